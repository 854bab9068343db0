"""DraftTrainingArguments: transformers' `TrainingArguments`, and what is particular to drafters."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments
from transformers.utils import is_torch_xla_available

from .checks import EVERY, check_settings
from .losses.objectives import OBJECTIVES, ObjectiveSettings
from .losses.sums import REDUCTIONS, gamma_after_epochs, linear_gamma


@dataclass
class DraftTrainingArguments(TrainingArguments):
    """`TrainingArguments` for [`DraftTrainer`]."""

    # JSON on the command line.
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "chat_template_kwargs", "objective"]

    draft_tokens: int = field(
        default=8,
        metadata={
            "help": "PARD, and DART where pardraft train makes the drafter: how many tokens it learns to draft (K; d). Others "
            "learn their block."
        },
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Propose so many tokens only, those that are learned most often (counted in the target's own answers), and "
            "read no other rows of the head; all by default."
        },
    )
    cod_retention: float = field(
        default=0.7, metadata={"help": "PARD: retention decay r of conditional drop-token; 1 keeps every mask."}
    )
    cod_min_retention: float = field(
        default=0.2, metadata={"help": "PARD: least share of positions that a subtask keeps (r_min)."}
    )
    objective: dict[str, float] | str | None = field(
        default=None,
        metadata={
            "help": "What is learned: a weighted sum such as cross_entropy+0.3*first_error+40*chain_reward, or a mapping of "
            f"names to coefficients, of {', '.join(OBJECTIVES)}. By default annealed_kl for DART, "
            "subtask_cross_entropy for PARD, and cross_entropy for others."
        },
    )
    loss_reduction: str = field(
        default=REDUCTIONS[0],
        metadata={
            "help": "weight_sum divides each objective by the sum of its weights, so that they leave its scale alone; paper sums "
            "over the positions and averages over the blocks, as the equations say.",
            "choices": list(REDUCTIONS),
        },
    )
    loss_chunk_rows: int | None = field(
        default=None,
        metadata={
            "help": "How many supervised positions go through the lm_head at a time: their logits are the largest tensors of a "
            "step. By default those of 32 MiB of logits on a CPU (128 at least) and 512 elsewhere, and more of a small draft "
            "vocabulary."
        },
    )
    kl_temperature: float = field(
        default=1.0,
        metadata={"help": "Temperature T that softens both laws of annealed_kl, forward_kl and cat_kl, times T^2."},
    )
    dpace_alpha: float = field(
        default=0.5,
        metadata={
            "help": "dpace: smoothing of the drafter's probabilities p, as (1 - alpha) p + alpha; 0 leaves them."
        },
    )
    streak_prefixes: int = field(
        default=16,
        metadata={
            "help": "streak: for how many prefixes of an example the target samples a continuation in each step."
        },
    )
    num_anchors: int | str = field(
        default=512,
        metadata={
            "help": "DFlash, DFlare, DART: most blocks per batch item, packed or not, chosen anew in each epoch; all: after "
            "every token that one can begin with."
        },
    )
    max_length: int | None = field(
        default=3072,
        metadata={"help": "Tokens at which texts are cut off, and length of packed examples; None cuts nothing."},
    )
    packing: bool = field(
        default=False,
        metadata={"help": "Put several texts into an example of at most max_length tokens; none sees another."},
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'What the chat template takes besides messages, such as {"enable_thinking": false}.'},
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that prepare the data set."})
    training_attention: str = field(
        default="auto",
        metadata={
            "help": "The drafter's attention: dense, in runs of queries; flex (CUDA); or auto: flex where it can train."
        },
    )
    loss_gamma: float | None = field(
        default=None,
        metadata={
            "help": "Decay constant of the position weights exp(-(k - 1) / gamma); None weighs all positions alike."
        },
    )
    use_cache: bool = field(
        default=True,
        metadata={"help": "What the trained drafter's config says; training itself has no use for the cache."},
    )
    loss_gamma_end: float | None = field(
        default=None,
        metadata={
            "help": "Let gamma grow linearly with the steps, from loss_gamma to this value (arXiv 2606.02091, eq. 5)."
        },
    )
    loss_gamma_epoch_step: float | None = field(
        default=None,
        metadata={
            "help": "Let gamma grow by this much after each epoch, from loss_gamma on (arXiv 2606.02091, section A.1)."
        },
    )
    kl_gamma: float = field(
        default=0.6,
        metadata={"help": "DART: annealing coefficient of the KL objective, whose position t weighs kl_gamma^(t - 1)."},
    )
    features_folder: str | None = field(
        default=None,
        metadata={
            "help": "Read the target's hidden states from this folder, which pardraft cache-features wrote, rather than run its "
            "layers in every epoch."
        },
    )
    keep_adapter: bool = field(
        default=False,
        metadata={"help": "Save the adapter itself, rather than merged into the drafter."},
    )
    tau_prompts: int = field(
        default=4,
        metadata={"help": "Held-out prompts that an evaluation decodes with the drafter, for `eval_tau`; 0 for none."},
    )
    tau_new_tokens: int = field(default=64, metadata={"help": "Tokens to write after each of these prompts."})
    tau_temperature: float = field(default=0.0, metadata={"help": "Temperature of this decoding; 0 is greedy."})
    overwrite_output: bool = field(
        default=False, metadata={"help": "Start anew where an earlier run was, and remove its checkpoints."}
    )
    resume_changed: bool = field(
        default=False,
        metadata={
            "help": "Go on from a checkpoint although settings, data or target are not those that it was trained with."
        },
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Off: the collators choose the columns they read."}
    )

    def __post_init__(self) -> None:
        # A CPU computes in bfloat16, too; `TrainingArguments` would ask for use_cpu, which there is no choice about.
        if (self.bf16 or self.bf16_full_eval) and not torch.accelerator.is_available() and not is_torch_xla_available():
            self.use_cpu = True
        if not torch.accelerator.is_available():
            # There is nothing to pin memory for, and torch would warn of it in every run.
            self.dataloader_pin_memory = False
        super().__post_init__()
        check_settings(self)

    def objective_settings(self, gamma: float | None) -> ObjectiveSettings:
        """The numbers that objectives share.

        Args:
            gamma: decay constant of the position weights.
        """
        return ObjectiveSettings(gamma, self.kl_gamma, self.dpace_alpha, self.loss_reduction)

    @property
    def gamma_grows(self) -> bool:
        """Whether gamma is another one later."""
        return self.loss_gamma_end is not None or self.loss_gamma_epoch_step is not None

    def gamma_after(self, state: TrainerState, num_passes: int) -> float | None:
        """The decay constant of the next step's position weights, from the steps or the passes over the data that are done."""
        if self.loss_gamma_end is not None:
            return linear_gamma(state.global_step, max(state.max_steps, 1), self.loss_gamma, self.loss_gamma_end)
        if self.loss_gamma_epoch_step is not None:
            return gamma_after_epochs(num_passes, self.loss_gamma, self.loss_gamma_epoch_step)
        return self.loss_gamma

    @property
    def most_anchors(self) -> int | None:
        """`num_anchors`, or `None` for no limit."""
        return None if self.num_anchors == EVERY else self.num_anchors
