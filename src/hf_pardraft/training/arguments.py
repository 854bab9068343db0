"""DraftTrainingArguments: transformers' `TrainingArguments`, and what is particular to drafters."""

from dataclasses import dataclass, field

from transformers import TrainingArguments


@dataclass
class DraftTrainingArguments(TrainingArguments):
    """`TrainingArguments` for [`DraftTrainer`]."""

    draft_tokens: int = field(
        default=8, metadata={"help": "PARD: how many tokens the drafter learns to draft (K). Others learn their block."}
    )
    cod_retention: float = field(
        default=0.7, metadata={"help": "PARD: retention decay r of conditional drop-token; 1 keeps every row."}
    )
    cod_min_retention: float = field(
        default=0.2, metadata={"help": "PARD: least share of rows that a subtask keeps (r_min)."}
    )
    num_anchors: int = field(default=512, metadata={"help": "DFlash, DFlare, DART: most blocks per sequence and step."})
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
        metadata={"help": "Let gamma grow linearly with the steps, from loss_gamma to this value (dflare.txt, eq. 5)."},
    )
    loss_gamma_epoch_step: float | None = field(
        default=None,
        metadata={
            "help": "Let gamma grow by this much after each epoch, from loss_gamma on (dflare.txt, section A.1)."
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
        metadata={
            "help": "With a peft_config: save the adapter itself, rather than the drafter with the adapter merged in."
        },
    )
    tau_prompts: int = field(
        default=4,
        metadata={"help": "Held-out prompts that an evaluation decodes with the drafter, for `eval_tau`; 0 for none."},
    )
    tau_new_tokens: int = field(default=64, metadata={"help": "Tokens to write after each of these prompts."})
    tau_temperature: float = field(default=0.0, metadata={"help": "Temperature of this decoding; 0 is greedy."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Off: the collators choose the columns they read."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_tokens < 1:
            raise ValueError(f"draft_tokens must be at least 1, got {self.draft_tokens}")
        if not 0 < self.cod_retention <= 1 or not 0 <= self.cod_min_retention <= 1:
            raise ValueError(
                "cod_retention must be in (0, 1] and cod_min_retention in [0, 1], got "
                f"{self.cod_retention} and {self.cod_min_retention}"
            )
        if self.num_anchors < 1:
            raise ValueError(f"num_anchors must be at least 1, got {self.num_anchors}")
        if self.loss_gamma is not None and self.loss_gamma <= 0:
            raise ValueError(f"loss_gamma must be positive, or None for uniform weights, got {self.loss_gamma}")
        if not 0 < self.kl_gamma <= 1:
            raise ValueError(f"kl_gamma must be in (0, 1], got {self.kl_gamma}: 1 weighs all positions alike")
        self._check_gamma_schedule()
        self._check_tau()

    def _check_tau(self) -> None:
        if self.tau_prompts < 0 or self.tau_new_tokens < 1 or self.tau_temperature < 0:
            raise ValueError(
                "expected tau_prompts >= 0, tau_new_tokens >= 1 and tau_temperature >= 0, got "
                f"{self.tau_prompts}, {self.tau_new_tokens} and {self.tau_temperature}"
            )
        if self.metric_for_best_model in ("tau", "eval_tau") and not self.tau_prompts:
            raise ValueError(
                "metric_for_best_model='tau' needs prompts to decode, got tau_prompts=0: set it to 1 or more"
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
