"""Models, tokenizers and drafters by name, as commands load them: no code that comes with one is run unless the user says so, and
whatever is wrong with one is an error that names it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..auto import AutoDrafter, drafter_class_for, find_drafter_config
from ..checkpoints.config_checks import are_whole, is_number, is_whole
from ..checkpoints.files import check_generation_config, check_place
from ..checkpoints.tensor_files import describe_safetensors
from ..models.base import ParallelDrafter
from ..models.modeling_pard import PardDrafter
from .files import read_json
from .options import checked_device, checked_dtype

# How an allocation that fails is told where it is an ordinary RuntimeError.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
# What settings of `generate` may hold, in a file that somebody else wrote.
WHOLE = (
    "max_new_tokens max_length min_length min_new_tokens top_k num_beams num_return_sequences no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size num_assistant_tokens assistant_early_exit"
)
NUMBERS = (
    "temperature top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty "
    "guidance_scale diversity_penalty"
)
SWITCHES = "do_sample use_cache renormalize_logits remove_invalid_values"
TOKENS = "eos_token_id pad_token_id bos_token_id forced_bos_token_id forced_eos_token_id"
LISTS_OF_TOKENS = "suppress_tokens begin_suppress_tokens"
UNEXPECTED = (
    ": its files are damaged, or of a kind that this version of transformers does not read. If they are neither, pardraft "
    "--debug shows what to report"
)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A target's tokenizer.

    Raises:
        ValueError: for a drafter that is bound to a target, and has none of its own.
    """
    fields = find_drafter_config(name)
    if fields is not None and not issubclass(drafter_class_for(fields), PardDrafter):
        raise ValueError(
            f"expected a target or its tokenizer, and {name} holds a drafter: name the target that it drafts for"
        )
    with naming(name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def load_config(name: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    with naming(name):
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def context_length(config: PreTrainedConfig) -> int | None:
    """How many tokens a text of the model may have; `None` if there is no end."""
    # As an attribute it is there under a name of the family's own, too (`n_positions`).
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def end_of_text_ids(target: PreTrainedModel, config: GenerationConfig | None = None) -> set[int]:
    """The token ids that end a text of `target`; those of a call's `config` take the place of its own."""
    asked = None if config is None else config.eos_token_id
    ids = target.generation_config.eos_token_id if asked is None else asked
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


@contextmanager
def without_settings_of_its_own(target: PreTrainedModel) -> Iterator[None]:
    """Let a target's `generation_config` add nothing to what a call of `generate` asks for.

    It is for those who call the target: it may ask for beams, for no cache or for a tokenizer to find stop strings with, or for
    another law; and what counts from a text's beginning or end counts anew in each call of several.
    """
    with ExitStack() as parts:
        for part in target.modules():
            if "generation_config" in vars(part):
                parts.enter_context(mock.patch.object(part, "generation_config", GenerationConfig()))
        yield


def up_to_end(tokens: list[int], ends: set[int]) -> list[int]:
    """New tokens up to the one that ends a text, and with it."""
    return tokens[: next((place for place, token in enumerate(tokens, start=1) if token in ends), None)]


def load_model(name: str, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
    """A causal language model; `options` are those of `from_pretrained`."""
    with naming(name):
        # transformers passes over one that it can't read.
        check_generation_config(name)
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
        check_generation_settings(vars(model.generation_config), f"the generation_config.json of {name}")
        return model


def check_generation_settings(settings: dict[str, Any], source: str) -> None:
    """Raise a `ValueError` for a setting of a type that it can't have: transformers passes it on, and fails anywhere.

    Args:
        settings: by name.
        source: where they stand.
    """
    kinds = (
        (WHOLE, is_whole, "a whole number"),
        (NUMBERS, is_number, "a number"),
        (SWITCHES, lambda value: isinstance(value, bool), "true or false"),
        (TOKENS, lambda value: is_whole(value) or are_whole(value), "a token id or a list of them"),
        (LISTS_OF_TOKENS, are_whole, "a list of token ids"),
        ("stop_strings", are_texts, "a text or a list of texts"),
    )
    for names, is_right, expected in kinds:
        for name in names.split():
            value = settings.get(name)
            if value is not None and not is_right(value):
                raise ValueError(f"{name} in {source} should be {expected}, got {value!r}: mend it there")


def are_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(text, str) for text in value))


def load_drafter(name: str, **options: Any) -> ParallelDrafter:
    """A drafter, without any code that came with it; `options` are those of `from_pretrained`."""
    with naming(name):
        return AutoDrafter.from_pretrained(name, **options)


def load_models(
    target: str, drafter: str | None, dtype: str, device: str, trust_remote_code: bool = False
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, ParallelDrafter | None]:
    """The target's tokenizer, the target, and its drafter if one is named.

    Raises:
        OSError, ValueError: if one can't be loaded, or there is no such dtype or device.
    """
    options = {"dtype": checked_dtype(dtype), "device_map": checked_device(device)}
    tokenizer = load_tokenizer(target, trust_remote_code)
    loaded = load_model(target, trust_remote_code, **options)
    return tokenizer, loaded, None if drafter is None else load_drafter(drafter, **options)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Say what could not be loaded, and which file is at fault if that can be told: transformers' own message may not, and files
    that are damaged in a way that it does not expect show as any error, and a path that leads nowhere is a repository to it."""
    check_place(source)
    try:
        yield
    # A file that is in the way was not to be loaded.
    except (FileExistsError, MemoryError, torch.OutOfMemoryError, ImportError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{source!r} comes with code of its own, which is not run unasked: read it, and if you trust it pass "
                "--trust-remote-code (for a target; no drafter's code is run)"
            ) from error
        is_told = isinstance(error, (OSError, ValueError))
        if is_told and Path(source).name in str(error):
            raise
        reason = f": {error}" if is_told else f" ({type(error).__name__}: {error})"
        damaged = damaged_file(Path(source))
        if damaged is not None:
            raise ValueError(f"can't load {source!r}: {damaged}") from error
        advice = "" if is_told else UNEXPECTED
        raise (OSError if isinstance(error, OSError) else ValueError)(
            f"can't load {source!r}{reason}{advice}"
        ) from error


def damaged_file(folder: Path) -> str | None:
    """What is wrong with a file of a model's folder, if one is no JSON object or no safetensors file."""
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            found = read_json(path)
        except (OSError, ValueError) as error:
            return str(error)
        if not isinstance(found, dict):
            return f"{path} should hold a JSON object, got a {type(found).__name__}"
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        try:
            describe_safetensors(str(path))
        except (OSError, ValueError) as error:
            return str(error)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    is_torch = isinstance(error, RuntimeError) and any(text in str(error).lower() for text in OUT_OF_MEMORY)
    return isinstance(error, MemoryError) or is_torch
