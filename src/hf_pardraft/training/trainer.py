"""DraftTrainer: a `Trainer` for drafters, with the target frozen beside it."""

import warnings
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback

from .arguments import DraftTrainingArguments
from .attention import training_attention
from .collators import COLLATORS
from .data import prepare_all
from .features import freeze
from .learner import Learner
from .losses import gamma_after_epochs, linear_gamma
from .metrics import DraftMetrics
from .objectives import (
    OBJECTIVES,
    BlockScores,
    ObjectiveSettings,
    combined,
    objective_sums,
    parse_objective,
    total_loss,
)
from .sums import Sums, added, denominators_of, mean_of, with_denominators


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
        self.learner = Learner(
            drafter=model,
            target=target,
            coefficients=parse_objective(args.objective or model.training_objective),
            depth=model.max_draft_depth or args.draft_tokens,
            rows_per_chunk=args.loss_chunk_rows,
            temperature=args.kl_temperature,
            streak_prefixes=args.streak_prefixes,
            seed=args.seed,
            attention=training_attention(model, args.training_attention, args.device),
        )
        check_one_device(args)
        kwargs = prepare_all(model, args, kwargs)
        super().__init__(model=model, args=args, data_collator=data_collator, **kwargs)
        if target is not None and args.place_model_on_device:
            target.to(args.device)
        # Numerators are divided by the denominators of all accumulated batches.
        self.loss_is_scaled_for_ga = True
        self.model_accepts_loss_kwargs = False
        self._sums: dict[str, dict[str, Sums]] = {"train": {}, "eval": {}}
        self.metrics = {"train": DraftMetrics(), "eval": DraftMetrics()}
        self.add_callback(_TellTheEpoch([self.data_collator, self.learner]))
        model.adopt_training(args.draft_tokens)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """What target and drafter say, the sums of the objectives, the loss, metrics.

        Args:
            num_items_in_batch: the objectives' denominators, summed over accumulated batches and processes; by default those of
                this batch, over processes.
        """
        training = model.training
        # Evaluation losses are compared with each other, so their weights stay what they are before the first step.
        gamma = self.current_gamma() if training else self.args.loss_gamma
        scores = self.learner.scores(model, inputs, None if training else self._num_counted(inputs))
        sums = self.draft_sums(scores, gamma)
        mode = "train" if training else "eval"
        self.metrics[mode].add(scores.is_right, scores.valid)
        self._sums[mode] = added(self._sums[mode], sums)
        if num_items_in_batch is None:
            num_items_in_batch = self.over_processes(denominators_of(sums))
        loss = total_loss(self.learner.coefficients, with_denominators(sums, num_items_in_batch))
        # Each process has its part of the numerators, and gradients and logged losses are averaged over processes.
        loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, scores) if return_outputs else loss

    def draft_sums(self, scores: BlockScores, gamma: float | None) -> dict[str, Sums]:
        """The objectives' sums over a batch.

        Args:
            scores: see [`BlockScores`].
            gamma: decay constant of the position weights.
        """
        args = self.args
        settings = ObjectiveSettings(gamma, args.kl_gamma, args.dpace_alpha, args.loss_reduction)
        return objective_sums(self.learner.coefficients, scores, settings)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """As in `Trainer`; the batches come with the objectives' denominators over all of them and all processes.

        Where these depend on what the drafter says (its first errors, say), it is asked beforehand, without gradients.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if len(batches) < 2 and not self.learner.known_before:
            # Its own forward will tell.
            return batches, None
        gamma, parts = self.current_gamma(), []
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices), self.compute_loss_context_manager():
            # With the dropout of training, and the random numbers that it will draw again.
            self.model_wrapped.train()
            for batch in map(self._prepare_inputs, batches):
                known = self.learner.known_before
                scores = self.learner.blank_scores(batch) if known else self.learner.scores(self.model_wrapped, batch)
                parts.append(denominators_of(self.draft_sums(scores, gamma)))
        return batches, self.over_processes(torch.stack(parts).sum(dim=0)) if parts else None

    def over_processes(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor that each process has."""
        if self.accelerator.num_processes == 1:
            return values
        return self.accelerator.reduce(values, reduction="sum") / self.get_tp_size()

    def _num_counted(self, inputs: dict) -> int | None:
        """How many examples of an evaluation batch are no repetitions, which fill up the last one of several processes."""
        state = self.accelerator.gradient_state
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return None
        size = len(inputs["input_ids"])
        return min(max(state.remainder - self.accelerator.process_index * size, 0), size)

    def current_gamma(self) -> float | None:
        """The decay constant of the next step's position weights, from the steps or epochs that are done."""
        args, state = self.args, self.state
        if args.loss_gamma_end is not None:
            return linear_gamma(state.global_step, max(state.max_steps, 1), args.loss_gamma, args.loss_gamma_end)
        if args.loss_gamma_epoch_step is not None:
            return gamma_after_epochs(state.epoch or 0, args.loss_gamma, args.loss_gamma_epoch_step)
        return args.loss_gamma

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

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As in `Trainer`; the loss is that of all batches as one."""
        self._sums["eval"] = {}
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._sums["eval"]:
            values = self._pop_values("eval")
            found = {"loss": combined(self.learner.coefficients, values)}
            found |= values if len(values) > 1 else {}
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return output

    def _pop_values(self, mode: str) -> dict[str, float]:
        """What each objective was since this was last asked, over all batches and processes as one."""
        sums, self._sums[mode] = self._sums[mode], {}
        if not sums:
            return {}
        # Numerators first, then denominators, in one exchange.
        sizes = [len(part.denominators) for part in sums.values()]
        both = [torch.cat([part[field] for part in sums.values()]) for field in range(2)]
        numerators, denominators = self.over_processes(torch.stack(both))
        quotients = zip(sums, numerators.split(sizes), denominators.split(sizes), strict=True)
        return {name: mean_of(*parts, OBJECTIVES[name].epsilon).item() for name, *parts in quotients}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the draft metrics that were gathered since the last log, and gamma if it grows."""
        grows = self.args.loss_gamma_end is not None or self.args.loss_gamma_epoch_step is not None
        if "loss" in logs and grows:
            logs["loss_gamma"] = self.current_gamma()
        if "loss" in logs:
            values = self._pop_values("train")
            logs.update(values if len(values) > 1 else {})
        for mode, marker, prefix in (("train", "loss", ""), ("eval", "eval_loss", "eval_")):
            if marker in logs:
                logs.update({prefix + name: value for name, value in self.metrics[mode].pop().items()})
        super().log(logs, *args, **kwargs)


class _TellTheEpoch(TrainerCallback):
    """Patterns, anchors and continuations differ between epochs, and are the same again when a run resumes."""

    def __init__(self, listeners: list[Any]) -> None:
        self.listeners = listeners

    def on_epoch_begin(self, args, state, control, **kwargs):
        for listener in self.listeners:
            listener.epoch = int(state.epoch or 0)


def check_one_device(args: DraftTrainingArguments) -> None:
    """Let one process use one device: the batches are no tensors that `DataParallel` could divide."""
    if args.n_gpu > 1:
        warnings.warn(
            f"one process trains on one device, and sees {args.n_gpu}: the others stay idle. Start one process for each, with "
            "accelerate launch or torchrun",
            UserWarning,
            stacklevel=3,
        )
        args._n_gpu = 1
