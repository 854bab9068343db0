"""What `pardraft make` is asked for, and what it refuses before any work."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_torch_bf16_gpu_available

from ..checkpoints.published import KIND_NAMES
from ..datagen.rewriting import Rewrite
from ..datagen.user_turns import UserTurns
from ..models.base import check_vocabulary, text_fact
from ..models.configuration_pard import config_class_of
from ..pairing.fresh import default_tapped_hidden_states
from ..pairing.remembered import own_name
from ..pairing.target_checks import check_can_be_tapped, num_layer_outputs
from ..user_input.data import load_data, require_datasets
from ..user_input.models import load_config, load_tokenizer

# Kinds of drafters that it makes.
KINDS = ("dflare", "dflash", "dart", "pard")
# Enough for some to be held out, and some to be learned.
LEAST_PROMPTS = 8
# Columns that hold a prompt, as `pardraft regenerate` reads them.
PROMPT_COLUMNS = ("messages", "conversations", "prompt")


@dataclass(frozen=True)
class MakeSettings:
    """What a user asks for. A run that goes on must ask for the same.

    Attributes:
        target: the model to draft for: a folder or a Hub repository.
        kind: of the drafter, one of [`KINDS`].
        hours: that all stages may take together.
        dataset: prompts for the target to answer; `None` if it writes them itself.
        base: pard: the causal LM that becomes the drafter; `None` for a copy of the target with fewer layers.
        bf16: whether everything computes in bfloat16, or in float32; `None` as the machine does best.
        chat_template_kwargs: what the chat template takes besides messages.
        seed: of everything that is drawn.
        trust_remote_code: whether code that comes with the target is run.
    """

    target: str
    kind: str = "dflare"
    hours: float = 4.0
    dataset: str | None = None
    base: str | None = None
    bf16: bool | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"expected a kind of drafter ({', '.join(KINDS)}), got {self.kind!r}")
        if not (math.isfinite(self.hours) and self.hours > 0):
            raise ValueError(
                f"expected a finite --hours above 0, got {self.hours:g}: it is the time that all stages share"
            )
        if self.base is not None and self.kind != "pard":
            raise ValueError(f"--base is what a pard drafter is made of, got it for {self.kind}: leave it out")

    @property
    def seconds(self) -> float:
        return 3600 * self.hours

    @property
    def kind_name(self) -> str:
        return KIND_NAMES[self.kind]

    @property
    def target_name(self) -> str:
        return own_name(self.target)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Machine:
    """What computes here.

    Attributes:
        has_accelerator: whether there is anything but a CPU.
        computes_bf16: whether an accelerator does bfloat16.
    """

    has_accelerator: bool
    computes_bf16: bool

    @classmethod
    def this_one(cls) -> "Machine":
        has_accelerator = torch.accelerator.is_available()
        return cls(has_accelerator, has_accelerator and is_torch_bf16_gpu_available())

    def dtype(self, settings: MakeSettings) -> str:
        """What everything computes in: what is asked for, or else bfloat16 where an accelerator does that."""
        return "bfloat16" if (self.computes_bf16 if settings.bf16 is None else settings.bf16) else "float32"


def check_inputs(settings: MakeSettings) -> PreTrainedConfig:
    """The target's configuration, if everything that is named is there and fits together, as far as is known without weights.

    Raises:
        ImportError: if a package is missing.
        OSError, ValueError: if a model or data set can't be read, or is of no use for this.
    """
    require_datasets("pardraft make")
    config = load_config(settings.target, settings.trust_remote_code)
    tokenizer = load_tokenizer(settings.target, settings.trust_remote_code)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    if settings.kind == "pard":
        check_base(settings.base, config if settings.base is None else load_config(settings.base), target)
    else:
        check_can_be_tapped(f"{settings.kind_name} drafter", target)
        # Of too few layers there is nothing to tap, whatever the kind.
        default_tapped_hidden_states(num_layer_outputs(target))
    if settings.dataset is None:
        try:
            UserTurns(tokenizer, settings.chat_template_kwargs)
        except ValueError as error:
            raise ValueError(
                f"the target can't write prompts itself ({error}). Pass prompts with --dataset, and it answers those"
            ) from error
    else:
        check_prompts(load_data(settings.dataset), settings, tokenizer)
    return config


def check_base(name: str | None, config: PreTrainedConfig, target: PreTrainedModel) -> None:
    """Raise a `ValueError` unless a PARD drafter for `target` can be made of the model of this `name`, `None` for the target
    itself, and `config`."""
    try:
        config_class_of(config.model_type)
    except ValueError as error:
        raise ValueError(
            f"{error}; name one with --base, whose tokenizer is the target's, or make another --kind"
        ) from error
    vocab_size = text_fact(target, "vocab_size")
    advice = (
        "Name another --base, or leave it out, which takes the target with fewer layers; if only the padding of the "
        f"embedding differs, save a base after model.resize_token_embeddings({vocab_size})"
    )
    check_vocabulary(f"the base {name}", config.vocab_size, vocab_size, advice)


def check_prompts(rows: Any, settings: MakeSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a `ValueError` unless a data set holds prompts that the target can be asked, and enough of them."""
    name = settings.dataset
    if len(rows) < LEAST_PROMPTS:
        raise ValueError(f"expected {LEAST_PROMPTS} prompts or more in {name}, got {len(rows)}")
    columns = list(rows[0])
    if not any(column in columns for column in PROMPT_COLUMNS):
        raise ValueError(
            f"expected a column of prompts in {name} ({', '.join(PROMPT_COLUMNS)}), got columns {', '.join(columns)}: rename one"
        )
    errors = [trouble_of(rows[index], tokenizer, settings.chat_template_kwargs) for index in range(LEAST_PROMPTS)]
    if all(errors):
        raise ValueError(f"none of the first {LEAST_PROMPTS} prompts in {name} can be asked: {errors[0]}")


def trouble_of(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> str | None:
    """Why the target can't be asked a prompt, if it can't."""
    try:
        rewrite = Rewrite(0, row)
        if rewrite.prompt_text is None:
            rewrite.chat_text(tokenizer, template_kwargs)
    except ValueError as error:
        return str(error)
    return None
