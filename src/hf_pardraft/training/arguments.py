"""DraftTrainingArguments: transformers' `TrainingArguments`, and what is particular to drafters."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler

from ..user_input.options import check_temperature
from .layouts.attention import ATTENTIONS
from .losses.objectives import OBJECTIVES, parse_objective
from .losses.sums import REDUCTIONS, check_reduction

# As of a block: far above anything published, and more would be asked of a machine than it has.
MOST_DRAFT_TOKENS = 4096
# For `num_anchors`: no limit.
EVERY = "all"


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
    cod_retention: float = field(
        default=0.7, metadata={"help": "PARD: retention decay r of conditional drop-token; 1 keeps every row."}
    )
    cod_min_retention: float = field(
        default=0.2, metadata={"help": "PARD: least share of rows that a subtask keeps (r_min)."}
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
    loss_chunk_rows: int = field(
        default=512,
        metadata={
            "help": "How many supervised rows go through the lm_head at a time: their logits are the largest tensors of a step."
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
            "help": "DFlash, DFlare, DART: most blocks per row of a batch, packed or not, chosen anew in each epoch; all: behind "
            "every token that one can begin with."
        },
    )
    max_length: int | None = field(
        default=3072,
        metadata={"help": "Tokens at which texts are cut off, and length of packed rows; None cuts nothing."},
    )
    packing: bool = field(
        default=False, metadata={"help": "Put several texts in a row of at most max_length tokens; none sees another."}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'What the chat template takes besides messages, such as {"enable_thinking": false}.'},
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that prepare the data set."})
    training_attention: str = field(
        default="auto",
        metadata={"help": "The drafter's attention: dense, flex (CUDA), or auto: flex where it can train."},
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
        super().__post_init__()
        if not 1 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise ValueError(f"draft_tokens must be from 1 to {MOST_DRAFT_TOKENS}, got {self.draft_tokens}")
        if not 0 < self.cod_retention <= 1 or not 0 <= self.cod_min_retention <= 1:
            raise ValueError(
                "cod_retention must be in (0, 1] and cod_min_retention in [0, 1], got "
                f"{self.cod_retention} and {self.cod_min_retention}"
            )
        if self.gradient_accumulation_steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be at least 1, got {self.gradient_accumulation_steps}")
        if self.num_anchors != EVERY and (not isinstance(self.num_anchors, int) or self.num_anchors < 1):
            raise ValueError(f"num_anchors must be at least 1, or {EVERY!r}, got {self.num_anchors!r}")
        if self.loss_gamma is not None and not self.loss_gamma > 0:
            raise ValueError(f"loss_gamma must be positive, or None for uniform weights, got {self.loss_gamma}")
        if not 0 < self.kl_gamma <= 1:
            raise ValueError(f"kl_gamma must be in (0, 1], got {self.kl_gamma}: 1 weighs all positions alike")
        self._check_data()
        self._check_gamma_schedule()
        self._check_scheduler()
        self._check_objective()
        self._check_tau()

    @property
    def most_anchors(self) -> int | None:
        """`num_anchors`, or `None` for no limit."""
        return None if self.num_anchors == EVERY else self.num_anchors

    def _check_scheduler(self) -> None:
        given = self.lr_scheduler_kwargs
        if not given:
            return
        if not isinstance(given, dict):
            raise ValueError(f"lr_scheduler_kwargs must be a mapping (JSON in a shell), got {given!r}")
        weight = torch.nn.Parameter(torch.zeros(1))
        try:
            get_scheduler(
                self.lr_scheduler_type, torch.optim.SGD([weight]), 1, 2, scheduler_specific_kwargs=dict(given)
            )
        except TypeError as error:
            raise ValueError(f"{self.lr_scheduler_type} takes no such lr_scheduler_kwargs: {error}") from error

    def _check_objective(self) -> None:
        if self.objective is not None:
            parse_objective(self.objective)
        check_reduction(self.loss_reduction)
        if self.loss_chunk_rows < 1:
            raise ValueError(f"loss_chunk_rows must be at least 1, got {self.loss_chunk_rows}")
        if not self.kl_temperature > 0:
            raise ValueError(f"kl_temperature must be positive, got {self.kl_temperature}")
        if not 0 <= self.dpace_alpha < 1:
            raise ValueError(f"dpace_alpha must be in [0, 1), got {self.dpace_alpha}")
        if self.streak_prefixes < 1:
            raise ValueError(f"streak_prefixes must be at least 1, got {self.streak_prefixes}")

    def _check_data(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(
                f"max_length must be at least 2 (a token and one to learn), or None, got {self.max_length}"
            )
        if self.packing and self.max_length is None:
            raise ValueError("packing needs the length of a row, got max_length=None: set max_length, too")
        if self.training_attention not in ATTENTIONS:
            raise ValueError(f"training_attention must be one of {ATTENTIONS}, got {self.training_attention!r}")
        if not isinstance(self.chat_template_kwargs, dict | None):
            raise ValueError(
                f"chat_template_kwargs must be a dict (JSON in a shell), got {self.chat_template_kwargs!r}"
            )

    def _check_tau(self) -> None:
        if self.tau_prompts < 0 or self.tau_new_tokens < 1:
            raise ValueError(
                f"expected tau_prompts >= 0 and tau_new_tokens >= 1, got {self.tau_prompts} and {self.tau_new_tokens}"
            )
        check_temperature(self.tau_temperature, "tau_temperature")
        if is_tau(self.metric_for_best_model) and not self.tau_prompts:
            raise ValueError(
                f"metric_for_best_model={self.metric_for_best_model!r} needs prompts to decode, got tau_prompts=0: set it to 1 "
                "or more"
            )

    def _check_gamma_schedule(self) -> None:
        end, epoch_step = self.loss_gamma_end, self.loss_gamma_epoch_step
        if end is not None and epoch_step is not None:
            raise ValueError(
                f"gamma grows either with the steps or with the epochs, got loss_gamma_end={end} and "
                f"loss_gamma_epoch_step={epoch_step}: leave one of them out"
            )
        if (end is not None or epoch_step is not None) and self.loss_gamma is None:
            raise ValueError("a growing gamma needs a value to start from, got loss_gamma=None: set loss_gamma, too")
        if end is not None and end <= self.loss_gamma:
            raise ValueError(f"loss_gamma_end must be above loss_gamma ({self.loss_gamma}), got {end}")
        if epoch_step is not None and epoch_step <= 0:
            raise ValueError(f"loss_gamma_epoch_step must be positive, got {epoch_step}")


def is_tau(metric: str | None) -> bool:
    """Whether a metric is a measured tau, `tau` or `eval_NAME_tau`, and not what accuracies let one expect."""
    return metric is not None and metric.split("_")[-1] == "tau" and not metric.endswith("expected_tau")
