"""DraftTrainer: a `Trainer` for drafters, with the target frozen beside it."""

from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback

from .arguments import DraftTrainingArguments
from .attention import attending_with, training_attention
from .collators import COLLATORS
from .data import prepare_all
from .features import freeze
from .forwards import FORWARDS, UNKNOWN, SupervisedRows, target_reading
from .losses import (
    annealing_weights,
    gamma_after_epochs,
    linear_gamma,
    position_weights,
    weighted_cross_entropy,
    weighted_kl,
)
from .metrics import DraftMetrics


class DraftTrainer(Trainer):
    """Trains a drafter on text, best on text that the target itself wrote.

    Args:
        model: the drafter.
        target: the model that it will draft for. Drafters that read hidden states need it; PARD only notes its kind.
        args: see [`DraftTrainingArguments`].
        data_collator: by default the one for the drafter's batch layout, set up from `args`.
        train_dataset, eval_dataset: conversations (`messages`), `prompt` and `completion`, `text`, or `input_ids` and
            `labels` (-100 for tokens that are not learned): a `datasets` data set, a list of such rows, or a name or file;
            see [`~hf_pardraft.training.data.prepare_data`]. All but the last need the tokenizer as `processing_class`.
        **kwargs: as for `Trainer`.

    Raises:
        ValueError: if the drafter needs a target and there is none, or it doesn't fit; if the data can't be learned from.
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
        if target is None and model.reads_target:
            raise ValueError(f"a {type(model).__name__} reads the target's hidden states: pass target=")
        if target is not None:
            model.check_target(target)
            model.note_target(target)
            freeze(target)
        self.target = target
        self.drafter = model
        data_collator = data_collator or COLLATORS[model.training_layout].for_drafter(model, args)
        kwargs = prepare_all(model, args, kwargs)
        self.training_attention = training_attention(model, args.training_attention, args.device)
        super().__init__(model=model, args=args, data_collator=data_collator, **kwargs)
        if target is not None and args.place_model_on_device:
            target.to(args.device)
        # The losses are means already, so the Trainer has to divide them by the accumulation steps.
        self.model_accepts_loss_kwargs = False
        self.metrics = {"train": DraftMetrics(), "eval": DraftMetrics()}
        self.add_callback(_TellCollatorTheEpoch(self.data_collator))
        model.adopt_training(args.draft_tokens)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """What the target says, draft logits, loss, metrics."""
        reading = target_reading(self.drafter, self.target, inputs, with_logits=self.learns_from_logits)
        forward = FORWARDS[self.drafter.training_layout]
        with attending_with(self.drafter, self.training_attention):
            rows = forward(model, self.drafter, self.target, inputs, reading.features)
        # Evaluation losses are compared with each other, so their weights stay what they are before the first step.
        gamma = self.current_gamma() if model.training else self.args.loss_gamma
        loss = self.draft_loss(rows, reading.logits, gamma)
        self.metrics["train" if model.training else "eval"].add(rows.logits, rows.labels, rows.positions)
        return (loss, rows) if return_outputs else loss

    @property
    def learns_from_logits(self) -> bool:
        """Whether the objective compares laws, and so needs the target's logits."""
        return self.drafter.training_objective == "annealed_kl"

    def current_gamma(self) -> float | None:
        """The decay constant of the next step's position weights, from the steps or epochs that are done."""
        args, state = self.args, self.state
        if args.loss_gamma_end is not None:
            return linear_gamma(state.global_step, max(state.max_steps, 1), args.loss_gamma, args.loss_gamma_end)
        if args.loss_gamma_epoch_step is not None:
            return gamma_after_epochs(state.epoch or 0, args.loss_gamma, args.loss_gamma_epoch_step)
        return args.loss_gamma

    def draft_loss(self, rows: SupervisedRows, target_logits: torch.Tensor | None, gamma: float | None) -> torch.Tensor:
        """The drafter's objective over the supervised rows, divided by the sum of their weights.

        Cross-entropy with position decay, or the annealed KL of the target's law to the drafter's: of the tokens that the
        drafter knows, where it doesn't know all.

        Args:
            rows: see [`SupervisedRows`].
            target_logits: `(batch, length, vocab)`, for the second.
            gamma: decay constant of the first's position weights.
        """
        deepest = max(self.args.draft_tokens, self.drafter.max_draft_depth or 0)
        if self.learns_from_logits:
            target_rows = target_logits[rows.target_rows]
            if rows.vocabulary is not None:
                target_rows = target_rows[:, rows.vocabulary]
            weights = annealing_weights(deepest, self.args.kl_gamma, rows.logits.device)[rows.positions - 1]
            total, weight_sum = weighted_kl(rows.logits, target_rows, weights)
        else:
            weights = position_weights(deepest, gamma, rows.logits.device)[rows.positions - 1]
            total, weight_sum = weighted_cross_entropy(rows.logits, rows.labels, weights * (rows.labels != UNKNOWN))
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
        """Add the draft metrics that were gathered since the last log, and gamma if it grows."""
        grows = self.args.loss_gamma_end is not None or self.args.loss_gamma_epoch_step is not None
        if "loss" in logs and grows:
            logs["loss_gamma"] = self.current_gamma()
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
