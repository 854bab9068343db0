"""Checks on the config.json of a drafter, before anything is built of it: what a field may hold, and what fields must agree."""

import math
from collections.abc import Callable
from typing import Any

from ..models.base import ParallelDrafter
from .tensor_files import FLOATS

# Whole numbers, and between which bounds they make sense. The upper ones are far above anything published: they keep a damaged
# or hostile file from asking for a model that no machine holds.
WHOLE_NUMBERS = {
    "hidden_size": (1, 1 << 17),
    "target_hidden_size": (1, 1 << 17),
    "intermediate_size": (1, 1 << 20),
    "num_hidden_layers": (1, 1024),
    "num_target_layers": (1, 4096),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (2, 1 << 14),
    # 0 where the target decides.
    "vocab_size": (0, 1 << 24),
    "draft_vocab_size": (1, 1 << 24),
    "max_position_embeddings": (1, 1 << 40),
    "sliding_window": (1, 1 << 40),
    "block_size": (1, ParallelDrafter.GREATEST_DEPTH),
    "draft_length": (0, ParallelDrafter.GREATEST_DEPTH),
    "pard2_target_dim": (1, 1 << 22),
    "mask_token_id": (0, 1 << 24),
    "pard_token": (0, 1 << 24),
}
# Numbers, and open intervals for them.
NUMBERS = {
    "rms_norm_eps": (0, 1),
    "rope_theta": (0, math.inf),
    "attention_dropout": (-1e-9, 1),
    "pard2_scale": (-math.inf, math.inf),
}
LISTS_OF_WHOLE_NUMBERS = (
    "target_layer_ids",
    "tapped_hidden_states",
    "pard2_target_layers",
    "pard_tokens",
    "aux_hidden_state_layer_ids",
)
BOOLEANS = (
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "use_sliding_window",
    "double_norm",
    "shifted",
    "pard2_proj_bias",
    "fusion_fc",
    "separate_kv",
    "own_head",
)
OBJECTS = (
    "dflash_config",
    "rope_parameters",
    "rope_scaling",
    "transformer_layer_config",
    "speculators_config",
    "auto_map",
)
NESTED = ("dflash_config", "transformer_layer_config")
# Whose configs may leave head_dim to this division; Qwen3's have a default.
HEADS_FILL_HIDDEN_SIZE = ("llama", "qwen2", "dart")
# Fields that say which file to load: transformers would follow them out of the folder.
REDIRECTIONS = ("transformers_weights",)
# Fields that choose an implementation. A name with a slash is a repository of kernels, whose code transformers would run.
IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
PRECISIONS = ("dtype", "torch_dtype")
# What any configuration takes, though it is no field of its class.
FREE_FIELDS = {"attn_implementation", "dtype", "rope_scaling", "rope_theta"}
# What a drafter's config of our own layout remembers of its training, which others may mean something else by.
OWN_TYPES = ("dflash", "dflare", "dart")
NAMES = ("target_name_or_path", "target_revision", "target_model_type", "tokenizer_hash")
CHAT_FORMAT = {"template_hash": str | None, "template_kwargs": dict, "prompt_end": str, "prompt_end_ids": list}
# What a rope configuration may hold: numbers above zero, or lists of them.
ROPES = ("rope_parameters", "rope_scaling")
ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def are_whole(value: Any) -> bool:
    """Whether it is a list of whole numbers."""
    return isinstance(value, list) and all(map(is_whole, value))


def check_config_fields(fields: Any, source: str, advice: str = "mend config.json") -> None:
    """Raise a `ValueError` for a config whose fields can't describe a drafter; it names the field and says what was expected.

    Fields that are absent or null are left to defaults, and to the drafter's own checks.

    Args:
        fields: what config.json holds.
        source: how to call it in the message.
        advice: what to do about it.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{source} should hold a JSON object, got a {type(fields).__name__}: get the file again")
    given = {name: value for name, value in fields.items() if value is not None}
    for name in OBJECTS:
        expect(given, name, lambda value: isinstance(value, dict), "an object", source, advice)
    for name, (least, most) in WHOLE_NUMBERS.items():
        text = f"a whole number from {least} to {most}"
        expect(given, name, lambda value, a=least, b=most: is_whole(value) and a <= value <= b, text, source, advice)
    for name, (low, high) in NUMBERS.items():
        text = f"a number above {low:g} and below {high:g}"
        expect(given, name, lambda value, a=low, b=high: is_number(value) and a < value < b, text, source, advice)
    for name in LISTS_OF_WHOLE_NUMBERS:
        expect(given, name, are_whole, "a list of whole numbers", source, advice)
    for name in BOOLEANS:
        expect(given, name, lambda value: isinstance(value, bool), "true or false", source, advice)
    if fields.get("model_type") in OWN_TYPES or "pard_token" in fields:
        for name, (is_right, text) in REMEMBERED.items():
            expect(given, name, is_right, text, source, advice)
    for name in REDIRECTIONS:
        expect(given, name, lambda value: False, "no such field (the weights have their usual names)", source, advice)
    for name in IMPLEMENTATIONS:
        text = "an implementation of transformers' own (kernels from the Hub are programs, which only a caller may ask for)"
        expect(given, name, names_no_kernel, text, source, advice)
    for name in PRECISIONS:
        expect(
            given, name, lambda value: value in FLOATS.values(), f"one of {', '.join(FLOATS.values())}", source, advice
        )
    for rope in (given[name] for name in ROPES if name in given):
        for name in ROPE_NUMBERS:
            expect(rope, name, is_above_zero, "a number above 0, or a list of such", f"the rope of {source}", advice)
    check_layer_types(fields, source, advice)
    check_heads(given, source, advice)
    for name in NESTED:
        if name in given:
            check_config_fields(given[name], f"{name} of {source}", advice)


def check_fresh_fields(fields: dict[str, Any]) -> None:
    """Raise a `ValueError` for settings of a fresh drafter that no machine could build, before anything is built of them."""
    for name, value in fields.items():
        least, most = WHOLE_NUMBERS.get({"num_layers": "num_hidden_layers"}.get(name, name), (None, None))
        if least is not None and value is not None and not (is_whole(value) and least <= value <= most):
            raise ValueError(
                f"{name} of a fresh drafter must be a whole number from {least} to {most}, got {value!r}: choose another value"
            )


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_fingerprint(value: Any) -> bool:
    """Whether it is a list of finite numbers."""
    return isinstance(value, list) and all(map(is_number, value))


def is_chat_format(value: Any) -> bool:
    """Whether it is what [`~hf_pardraft.pairing.chat_format.describe_chats`] returns."""
    is_whole_one = isinstance(value, dict) and all(
        name in value and isinstance(value[name], kind) for name, kind in CHAT_FORMAT.items()
    )
    return is_whole_one and all(map(is_whole, value["prompt_end_ids"]))


REMEMBERED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(NAMES, (is_text, "a text")),
    "target_fingerprint": (is_fingerprint, "a list of numbers"),
    "chat_format": (is_chat_format, f"an object with {', '.join(CHAT_FORMAT)}, as training writes it, or null"),
}


def without_foreign_notes(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of somebody else's config without those that have the name of what ours remember, and mean something else."""
    return {
        name: value
        for name, value in fields.items()
        if name not in REMEMBERED or value is None or REMEMBERED[name][0](value)
    }


def is_above_zero(value: Any) -> bool:
    """Whether a number, or each of a list, is finite and above zero; what is left open (null) passes."""
    return value is None or all(
        is_number(each) and each > 0 for each in (value if isinstance(value, list) else [value])
    )


def names_no_kernel(value: Any) -> bool:
    """Whether the name of an implementation, or each of several in an object, is no repository's."""
    names = value.values() if isinstance(value, dict) else [value]
    return all(name is None or (isinstance(name, str) and "/" not in name) for name in names)


def expect(
    fields: dict[str, Any], name: str, is_right: Callable[[Any], bool], expected: str, source: str, advice: str
) -> None:
    """Raise a `ValueError` if the field is there and is not `expected`."""
    if name in fields and not is_right(fields[name]):
        raise ValueError(f"{name} in {source} should be {expected}, got {fields[name]!r}: {advice}")


def check_layer_types(fields: dict[str, Any], source: str, advice: str) -> None:
    """Raise a `ValueError` unless there is one known type per layer."""
    types, count = fields.get("layer_types"), fields.get("num_hidden_layers")
    if types is None:
        return
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(name not in known for name in types) or count not in (None, len(types)):
        raise ValueError(
            f"layer_types in {source} should name one of {known} for each of {count} layers, got {types!r}: {advice}"
        )
    if "sliding_attention" in types and "sliding_window" in fields and fields["sliding_window"] is None:
        raise ValueError(
            f"sliding_window in {source} should be a whole number for its sliding_attention layers, and use_sliding_window true, "
            f"got none: {advice}"
        )


def check_heads(fields: dict[str, Any], source: str, advice: str) -> None:
    """Raise a `ValueError` if the heads don't go together, or don't fill the hidden size."""
    heads = fields.get("num_attention_heads")
    groups, size = fields.get("num_key_value_heads"), fields.get("hidden_size")
    if heads is not None and groups is not None and heads % groups:
        raise ValueError(
            f"num_attention_heads in {source} should be a multiple of num_key_value_heads, got {heads} and {groups}: {advice}"
        )
    head_dim = fields.get("head_dim")
    if head_dim is not None and head_dim % 2:
        raise ValueError(f"head_dim in {source} should be even, for rotary positions, got {head_dim}: {advice}")
    divides = fields.get("model_type") in HEADS_FILL_HIDDEN_SIZE and head_dim is None
    if divides and heads is not None and size is not None and size % heads:
        raise ValueError(
            f"hidden_size in {source} should be a multiple of num_attention_heads where no head_dim is given, got {size} and "
            f"{heads}: {advice}"
        )
