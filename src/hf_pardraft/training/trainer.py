"""DraftTrainer: a `Trainer` for drafters, with the target frozen beside it.

docs/architecture.md lists the functions that one training step passes through.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..models.modeling_pard import PardDrafter
from ..pairing.remembered import tokenizer_of
from .adapter_checks import check_base_is_named, check_peft_config
from .adapters import adapted, base_drafter, is_adapted
from .arguments import DraftTrainingArguments
from .batch_scorer import BatchScorer
from .best_metric import check_best_metric, is_tau
from .checks import (
    check_arguments,
    check_in_one_place,
    check_one_device,
    check_optimizer,
    check_pair,
    check_recomputing,
    check_spreading,
    warn_of_coarse_weights,
)
from .data.trainer_data import chat_arguments, prepare_all, prepare_for_training
from .drafter_files import DrafterFilesTrainer
from .held_out import draft_from, held_out_prompts, whole_copy
from .layouts.attention import attending_with
from .losses.objectives import BlockScores, combined, objective_sums, total_loss
from .losses.sums import Sums, denominators_of, with_denominators
from .metrics import DraftMetrics
from .passes import STREAM, GroupedByLength, PassCounter
from .progress import show_tables
from .run_identity import identity_of
from .target.feature_store import StoredStatesCollator, store_for
from .target.reading import freeze
from .vocabulary import set_frequent_vocabulary


class DraftTrainer(DrafterFilesTrainer):
    """Trains a drafter on text, best on text that the target itself wrote.

    Args:
        model: the drafter.
        target: the model that it will draft for. Drafters that read hidden states need it; PARD only notes its kind. It is
            frozen and put in evaluation mode, and stays so.
        args: see [`DraftTrainingArguments`].
        peft_config: train an adapter, LoRA or another of PEFT's methods, rather than all weights. A PARD drafter's mask token is
            learned, too. What `save_model` writes is the drafter with the adapter merged in, or the adapter itself
            (`keep_adapter`); `AutoDrafter` loads both.
        data_collator: by default the one for the drafter's batch layout, set up from `args`.
        train_dataset, eval_dataset: conversations (`messages`), `prompt` and `completion`, `text`, or `input_ids` and
            `labels` (-100 for tokens that are not learned) or TRL's `completion_mask` and `assistant_masks`: a `datasets` data
            set, a list of such rows, or a name or file;
            see [`~hf_pardraft.training.data.dataset.prepare_data`]. All but the last need the tokenizer as `processing_class`.
        **kwargs: as for `Trainer`.

    Evaluation logs `eval_accuracy_k`, the accuracy of each draft position; `eval_hit10_k`, how often the right token is among the
    ten likeliest; `eval_expected_tau`, what tau would be if positions were right independently; and, given a target, what
    becomes of drafts when it goes on from a few of the evaluation set's prompts with the drafter as it stands (`tau_prompts`):
    `eval_tau`, mean tokens per target forward, the bonus token counted, `eval_acceptance_k` and
    `eval_decoded_tokens_per_second`. Reporters get all of it, the terminal a table. With `metric_for_best_model="tau"` and
    `load_best_model_at_end` the best checkpoint is the one that drafts best.

    A checkpoint is written beside its place and moved there when it is complete, so a run that is killed at any time goes on
    from the last complete one. A loss or gradient that is not finite stops the run before any of it is saved.

    Raises:
        TypeError: if the model is no drafter, the target no model, `peft_config` none of PEFT's, or data can be read once only.
        ValueError: if the drafter needs a target and there is none, or it doesn't fit; if the data can't be learned from; or if
            tau is to choose the best checkpoint and can't be measured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel | None = None,
        args: DraftTrainingArguments | None = None,
        data_collator: Any = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args or DraftTrainingArguments("drafter-checkpoints")
        if not isinstance(args, DraftTrainingArguments):
            raise TypeError(
                f"DraftTrainer takes DraftTrainingArguments, got {type(args).__name__}: they are a subclass of it"
            )
        trained, model = model, base_drafter(model)
        check_arguments(args, kwargs)
        check_pair(model, target, args)
        if peft_config is not None:
            check_peft_config(peft_config, model)
        if target is not None:
            check_in_one_place(target)
            model.check_target(target)
            freeze(target)
        self.target, self.drafter, self._peft_config = target, model, peft_config
        self.scorer = BatchScorer.for_training(model, target, args)
        self._check_best_metric(args, kwargs)
        # What evaluation chooses at random stays as it is: its losses are compared with each other.
        collators = [data_collator or self.scorer.layout.for_drafter(model, args) for _ in ("training", "evaluation")]
        check_one_device(args)
        self._reads_raw_rows, raw_data = data_collator is not None, kwargs.get("train_dataset")
        kwargs = prepare_all(model, target, args, kwargs, self._reads_raw_rows)
        data_collator, self.eval_collator = self._with_stored_states(collators, args)
        before = [*model.parameters()]
        self._note_in_drafter(args, raw_data, kwargs)
        trained = self._with_adapter(trained, args)
        check_optimizer((kwargs.get("optimizers") or [None])[0], before, trained)
        super().__init__(model=trained, args=args, data_collator=data_collator, **kwargs)
        if not self.is_deepspeed_enabled:
            # DeepSpeed's optimizer has the weights in float32, too.
            warn_of_coarse_weights(trained)
        if target is not None and args.place_model_on_device:
            target.to(args.device)
        # Numerators are divided by the denominators of all accumulated batches.
        self.loss_is_scaled_for_ga = True
        self.model_accepts_loss_kwargs = False
        self.metrics = {"train": DraftMetrics(), "eval": DraftMetrics()}
        # Of the position weights in the last training step.
        self.last_gamma = args.loss_gamma
        if self.splits_weights:
            plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
            check_spreading(is_adapted(trained), plugin and plugin.zero3_save_16bit_model)
        self.passes = PassCounter([self.data_collator, self.scorer])
        self.add_callback(self.passes)
        show_tables(self)
        if isinstance(model, PardDrafter):
            # Masks beyond those of training have learned nothing.
            model.generation_config.num_assistant_tokens = args.draft_tokens

    def _check_best_metric(self, args: DraftTrainingArguments, kwargs: dict[str, Any]) -> None:
        """Raise a `ValueError` if what is to choose the best checkpoint will not be measured."""
        eval_sets, drafts = kwargs.get("eval_dataset"), self.target is not None and args.tau_prompts > 0
        # A class or a callback of a caller's own may report more.
        if eval_sets is not None and type(self) is DraftTrainer and not kwargs.get("callbacks"):
            check_best_metric(args, self.drafter, self.scorer.coefficients, eval_sets, drafts)

    def _determine_best_metric(self, metrics, trial):
        """As in `Trainer`; of checkpoints with the same tau the latest is the best.

        A few prompts tell taus coarsely, and a young drafter's is 1 in each evaluation: then the first one had learned the least.
        """
        metric = self.args.metric_for_best_model
        if is_tau(metric) and metrics.get(f"eval_{metric.removeprefix('eval_')}") == self.state.best_metric:
            self.state.best_metric = None
        return super()._determine_best_metric(metrics, trial)

    def _note_in_drafter(self, args: DraftTrainingArguments, raw_data: Any, kwargs: dict[str, Any]) -> None:
        """Let the drafter's config say what it is trained for: a draft vocabulary, the target, and how chats were rendered.

        Args:
            args: of the training.
            raw_data: the training data as they were given.
            kwargs: of `Trainer`, with prepared data.
        """
        if args.draft_vocab_size is not None:
            set_frequent_vocabulary(self.drafter, args.draft_vocab_size, kwargs.get("train_dataset"))
        if self.target is not None:
            tokenizer = tokenizer_of(kwargs.get("processing_class"))
            self.drafter.note_target(self.target, tokenizer, chat_arguments(raw_data, args))

    def _with_stored_states(self, collators: list[Any], args: DraftTrainingArguments) -> list[Any]:
        """The collators, whose batches bring the target's states where these are stored."""
        if args.features_folder is None:
            return collators
        store = store_for(self.drafter, self.target, args.features_folder, with_logits=self.scorer.reads_logits)
        return [StoredStatesCollator(collator, store, self.scorer.layout) for collator in collators]

    def _with_adapter(self, trained: nn.Module, args: DraftTrainingArguments) -> nn.Module:
        """What is trained: the drafter, or what PEFT has wrapped in it, already or only now."""
        if self._peft_config is not None:
            trained = adapted(self.drafter, self._peft_config)
        if is_adapted(trained) and args.keep_adapter:
            check_base_is_named(self.drafter)
        check_recomputing(self.drafter, args, is_adapted(trained))
        return trained

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """As in `Trainer`; the batches come with the objectives' denominators over all of them and all processes.

        Where these depend on what the drafter says (its first errors, say), it is asked beforehand, without gradients. What the
        target writes for a batch goes with it.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        checkpoint, self.resumed_from = self.resumed_from, None
        if len(batches) < 2 and not self.scorer.known_before:
            # Its own forward will tell.
            return batches, None
        gamma, parts, known = self.args.gamma_after(self.state, self.scorer.epoch), [], self.scorer.known_before
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices), self.compute_loss_context_manager():
            # With the dropout of training, and the random numbers that it will draw again.
            self.model_wrapped.train()
            if checkpoint is not None and self._is_within_an_epoch:
                # Trainer, which has skipped what was trained on, does this only after it has got these batches.
                self._load_rng_state(checkpoint)
            for index, batch in enumerate(map(self._prepare_inputs, batches)):
                if not known:
                    sampled = self.scorer.sampled(batch)
                    batch, batches[index] = {**batch, **sampled}, {**batches[index], **sampled}
                scores = self.scorer.blank_scores(batch) if known else self.scorer.scores(self.model_wrapped, batch)
                parts.append(denominators_of(self.draft_sums(scores, gamma)))
        return batches, self.over_processes(torch.stack(parts).sum(dim=0)) if parts else None

    @property
    def _is_within_an_epoch(self) -> bool:
        """Whether batches of this epoch were trained on before."""
        return (self.state.epoch or 0.0) % 1 > 0 and not self.args.ignore_data_skip

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """What target and drafter say, the sums of the objectives, the loss, metrics.

        Args:
            num_items_in_batch: the objectives' denominators, summed over accumulated batches and processes; by default those of
                this batch, over processes.
        """
        training = model.training
        # Evaluation losses are compared with each other, so their weights stay what they are before the first step.
        gamma = self.args.gamma_after(self.state, self.scorer.epoch) if training else self.args.loss_gamma
        self.last_gamma = gamma if training else self.last_gamma
        scores = self.scorer.scores(model, inputs, None if training else self._num_counted(inputs))
        sums = self.draft_sums(scores, gamma)
        self.metrics["train" if training else "eval"].add(sums, scores)
        if num_items_in_batch is None:
            num_items_in_batch = self.over_processes(denominators_of(sums))
        loss = total_loss(self.scorer.coefficients, with_denominators(sums, num_items_in_batch))
        # Each process has its part of the numerators, and gradients and logged losses are averaged over processes.
        loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, scores) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in `Trainer`; the drafter attends as it does in training in the backward pass, too, which may recompute layers."""
        with attending_with(self.drafter, self.scorer.attention):
            return super().training_step(*args, **kwargs)

    def draft_sums(self, scores: BlockScores, gamma: float | None) -> dict[str, Sums]:
        """The objectives' sums over a batch.

        Args:
            scores: see [`BlockScores`].
            gamma: decay constant of the position weights.
        """
        return objective_sums(self.scorer.coefficients, scores, self.args.objective_settings(gamma))

    def over_processes(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor that each process has."""
        if self.accelerator.num_processes == 1:
            return values
        return self.accelerator.reduce(values.to(self.args.device), reduction="sum") / self.get_tp_size()

    def _num_counted(self, inputs: dict) -> int | None:
        """How many examples of an evaluation batch are no repetitions, which fill up the last one of several processes."""
        state = self.accelerator.gradient_state
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return None
        size = len(inputs["input_ids"])
        return min(max(state.remainder - self.accelerator.process_index * size, 0), size)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """As in `Trainer`; the target is frozen and in evaluation mode throughout, whatever was done to it before.

        Raises:
            ValueError: if there is no complete checkpoint to resume from; if that is another run's, or the output folder holds
                one (see `resume_changed` and `overwrite_output`).
            FloatingPointError: if a loss or gradient is not finite.
            OSError: if a checkpoint can't be written, or somebody else writes the output folder.
        """
        if self.target is not None:
            freeze(self.target)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """As in `Trainer`; examples that are grouped by length come in an order that is known of each epoch."""
        sampler = super()._get_train_sampler(train_dataset)
        if type(sampler) is LengthGroupedSampler:
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler = GroupedByLength(sampler, seed)
            self.passes.listeners.append(sampler)
        return sampler

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    ) -> tuple[int, int]:
        """As in `Trainer`; of a stream it is known which pass a checkpoint is of, and how many of its batches were trained on."""
        # An earlier training, which was interrupted or ended between two logs, has left what it counted since the last one.
        self.metrics["train"] = DraftMetrics()
        counts = max_steps, num_update_steps_per_epoch, num_train_epochs
        found = super()._init_training_state(*counts, resume_from_checkpoint, trial)
        self.passes.resume(resume_from_checkpoint)
        if self.passes.place is None:
            return found
        num_steps = 0 if self.args.ignore_data_skip else self.state.global_step - self.passes.place["began"]
        return self.passes.place["number"], num_steps * self.args.gradient_accumulation_steps

    def noted_identity(self) -> dict[str, Any] | None:
        """As in [`WholeCheckpointTrainer`], with the place in a stream."""
        identity = super().noted_identity()
        return identity if identity is None or self.passes.place is None else {**identity, STREAM: self.passes.place}

    def find_identity(self) -> dict[str, Any]:
        """What this run's checkpoints depend on; see [`identity_of`]."""
        return identity_of(self.drafter, self.target, self.args, self.train_dataset, self._peft_config)

    def get_eval_dataloader(self, eval_dataset: Any = None):
        """As in `Trainer`; a data set that is given here may be all that the constructor takes."""
        is_name = isinstance(eval_dataset, str) and isinstance(self.eval_dataset, dict)
        if eval_dataset is not None and not (is_name and eval_dataset in self.eval_dataset):
            eval_dataset = self._prepared(eval_dataset)
        with self._collating_for_evaluation():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any):
        """As in `Trainer`; the data set may be all that the constructor takes."""
        with self._collating_for_evaluation():
            return super().get_test_dataloader(self._prepared(test_dataset))

    @contextmanager
    def _collating_for_evaluation(self) -> Iterator[None]:
        """Loaders that are made in it are of evaluation."""
        training, self.data_collator = self.data_collator, self.eval_collator
        try:
            yield
        finally:
            self.data_collator = training

    def _prepared(self, data: Any) -> Any:
        place = self.drafter, self.target, self.args, self.processing_class
        return prepare_for_training(*place, data, reads_raw_rows=self._reads_raw_rows)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss of an evaluation batch; the metrics are added up on the way."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def evaluation_loop(self, dataloader, description, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any):
        """As in `Trainer`, and the metrics of drafting: see the class. The loss is that of all batches as one."""
        self.metrics["eval"] = DraftMetrics()
        training_epoch, self.scorer.epoch = self.scorer.epoch, 0
        try:
            output = super().evaluation_loop(
                dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
            )
        finally:
            self.scorer.epoch = training_epoch
        values = self.metrics["eval"].pop_objectives(self.over_processes)
        found = {"loss": combined(self.scorer.coefficients, values)} if values else {}
        found |= values if len(values) > 1 else {}
        found |= self.metrics["eval"].pop_accuracies(self.over_processes)
        if self.args.tau_prompts and self.target is not None:
            found |= self.measured_drafting(dataloader.dataset)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return output

    def measured_drafting(self, examples: Any) -> dict[str, float]:
        """What becomes of drafts over prompts of `examples`, see [`DraftTrainer`]; processes that hold the drafter share them.

        Where its weights are spread over processes (FSDP, DeepSpeed's stage 3), a whole copy is made for the first one, which
        decodes alone.
        """
        args, prompts = self.args, held_out_prompts(examples, self.args.tau_prompts)
        if self.splits_weights:
            weights = self.accelerator.get_state_dict(self.deepspeed if self.is_deepspeed_enabled else self.model)
            is_first = args.process_index == 0
            drafter, prompts = (whole_copy(self.drafter, weights), prompts) if is_first else (self.drafter, [])
        else:
            drafter, prompts = self.drafter, prompts[args.process_index :: args.world_size]
        options = {"max_new_tokens": args.tau_new_tokens, "temperature": args.tau_temperature, "seed": args.seed}
        counted = draft_from(self.target, drafter, prompts, **options)
        return counted.over_processes(self.over_processes).metrics()

    @property
    def splits_weights(self) -> bool:
        """Whether no process holds the whole drafter."""
        if self.is_deepspeed_enabled:
            return self.accelerator.state.deepspeed_plugin.zero_stage == 3
        return self.accelerator.distributed_type == DistributedType.FSDP

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the draft metrics that were gathered since the last log, and the last step's gamma if it grows."""
        if "loss" in logs and self.args.gamma_grows:
            logs["loss_gamma"] = self.last_gamma
        if "loss" in logs:
            values = self.metrics["train"].pop_objectives(self.over_processes)
            logs.update(values if len(values) > 1 else {})
            logs.update(self.metrics["train"].pop_accuracies(self.over_processes))
        super().log(logs, *args, **kwargs)
