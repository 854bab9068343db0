"""DraftTrainer: a `Trainer` for drafters, with the target frozen beside it."""

from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback

from .arguments import DraftTrainingArguments
from .collators import BlockCollator, PardCollator
from .features import freeze
from .forwards import FORWARDS, SupervisedRows, target_features
from .losses import position_weights, weighted_cross_entropy
from .metrics import DraftMetrics

COLLATORS = {"pard": PardCollator, "dflash": BlockCollator}


class DraftTrainer(Trainer):
    """Trains a drafter on text, best on text that the target itself wrote.

    Args:
        model: the drafter.
        target: the model that it will draft for. Drafters that read hidden states need it; PARD only notes its kind.
        args: see [`DraftTrainingArguments`].
        data_collator: by default the one for this kind of drafter, set up from `args`.
        **kwargs: as for `Trainer`. Examples have `input_ids` and `labels` (-100 for tokens that are not learned).

    Raises:
        ValueError: if the drafter needs a target and there is none, or it doesn't fit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel | None = None,
        args: DraftTrainingArguments | None = None,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args or DraftTrainingArguments("drafter-checkpoints")
        if target is None and model.tapped_hidden_states:
            raise ValueError(f"a {type(model).__name__} reads the target's hidden states: pass target=")
        if target is not None:
            model.check_target(target)
            model.note_target(target)
            freeze(target)
        self.target = target
        self.drafter = model
        super().__init__(model=model, args=args, data_collator=data_collator or default_collator(model, args), **kwargs)
        if target is not None and args.place_model_on_device:
            target.to(args.device)
        # The losses are means already, so the Trainer has to divide them by the accumulation steps.
        self.model_accepts_loss_kwargs = False
        self.metrics = {"train": DraftMetrics(), "eval": DraftMetrics()}
        self.add_callback(_TellCollatorTheEpoch(self.data_collator))
        model.adopt_training(args.draft_tokens)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Features, draft logits, loss, metrics."""
        features = target_features(self.drafter, self.target, inputs)
        rows = FORWARDS[self.drafter.config.drafter_kind](model, self.drafter, self.target, inputs, features)
        loss = self.draft_loss(rows)
        self.metrics["train" if model.training else "eval"].add(rows.logits, rows.labels, rows.positions)
        return (loss, rows) if return_outputs else loss

    def draft_loss(self, rows: SupervisedRows) -> torch.Tensor:
        """Cross-entropy with position decay over the supervised rows, divided by the sum of their weights."""
        deepest = max(self.args.draft_tokens, self.drafter.draft_depth)
        weights = position_weights(deepest, self.args.loss_gamma, rows.logits.device)
        total, weight_sum = weighted_cross_entropy(rows.logits, rows.labels, weights[rows.positions - 1])
        return total / weight_sum.clamp(min=torch.finfo(weight_sum.dtype).tiny)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """As in `Trainer`, and what the drafter keeps outside the main file."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.drafter.load_separate_weights(resume_from_checkpoint)

    def _load_best_model(self):
        """As in `Trainer`, and what the drafter keeps outside the main file."""
        super()._load_best_model()
        self.drafter.load_separate_weights(self.state.best_model_checkpoint)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss of an evaluation batch; the metrics are added up on the way."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the draft metrics that were gathered since the last log."""
        for mode, marker, prefix in (("train", "loss", ""), ("eval", "eval_loss", "eval_")):
            if marker in logs:
                logs.update({prefix + name: value for name, value in self.metrics[mode].pop().items()})
        super().log(logs, *args, **kwargs)


class _TellCollatorTheEpoch(TrainerCallback):
    """Patterns and anchors differ between epochs, and are the same again when a run resumes."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.collator.epoch = int(state.epoch or 0)


def default_collator(drafter: PreTrainedModel, args: DraftTrainingArguments) -> PardCollator | BlockCollator:
    """The collator of a drafter's kind, set up from the training arguments."""
    collator = COLLATORS[drafter.config.drafter_kind]
    if collator is PardCollator:
        return PardCollator(
            drafter.config.pard_token, args.draft_tokens, args.cod_retention, args.cod_min_retention, args.seed
        )
    return BlockCollator(drafter.config.mask_token_id, drafter.config.block_size, args.num_anchors, args.seed)
