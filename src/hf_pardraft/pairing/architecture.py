"""A configuration whose layers are like a target's: as wide, with as many heads, and a rope as like as can be."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..models.base import text_fact

DEFAULT_THETA = 10000.0
# What families without `max_position_embeddings` call the length that they were made for.
OTHER_NAMES_OF_LENGTH = ("n_positions", "max_seq_len", "seq_length", "max_sequence_length", "max_target_positions")


def with_common_names(config: PreTrainedConfig) -> dict[str, Any]:
    """A config as a dict, in which what an older family calls by a name of its own (`n_head`) has the common name too."""
    fields = config.to_dict()
    fields |= {common: fields[own] for common, own in config.attribute_map.items() if own in fields}
    lengths = [fields[name] for name in OTHER_NAMES_OF_LENGTH if fields.get(name)]
    return {"max_position_embeddings": lengths[0], **fields} if lengths else fields


def widest(value: int | list[int] | None) -> int | None:
    """A width of a target's layers; of the widest, where each layer has its own (the MLPs of Gemma 3n)."""
    return max(value) if isinstance(value, (list, tuple)) else value


def rope_like(target: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """The rope of a drafter whose heads of `head_dim` are rotated whole, as like a target's (its config as a dict) as can be."""
    rope = target.get("rope_parameters") or {"rope_theta": target.get("rope_theta", DEFAULT_THETA)}
    # Models with several layer types keep one rope per type, or none for a type that is not rotated; the drafter's layers are
    # of full attention.
    if all(each is None or isinstance(each, dict) for each in rope.values()):
        ropes = [rope.get("full_attention"), *rope.values()]
        rope = next((each for each in ropes if each), {})
    rope = {"rope_type": "default", "rope_theta": DEFAULT_THETA, **rope}
    # Factors that fit a part of a head, or a head of another size, are of no use, and a family may have a rope of its own.
    num_factors = {len(rope[name]) for name in ("short_factor", "long_factor") if name in rope}
    fits = rope.pop("partial_rotary_factor", 1.0) == 1.0 and num_factors <= {head_dim // 2}
    is_known = rope["rope_type"] in ("default", *ROPE_INIT_FUNCTIONS)
    if is_known and (fits or rope["rope_type"] != "longrope"):
        return rope
    return {"rope_type": "default", "rope_theta": rope["rope_theta"]}


def architecture_like(target: PreTrainedModel) -> dict[str, Any]:
    """Fields of a Llama or Qwen3 configuration whose layers are as wide as those of a target.

    Raises:
        ValueError: if the target has no attention heads to be like.
    """
    fields = with_common_names(target.config.get_text_config(decoder=True))
    hidden_size, num_heads = text_fact(target, "hidden_size"), widest(fields.get("num_attention_heads"))
    if not num_heads:
        raise ValueError(
            f"a drafter's layers are like its target's, and {type(target).__name__} has no attention heads "
            "(num_attention_heads): use another target"
        )
    num_groups = widest(fields.get("num_key_value_heads")) or num_heads
    head_dim = widest(fields.get("head_dim")) or max(hidden_size // num_heads, 1)
    # Rotation turns pairs.
    head_dim += head_dim % 2
    length = fields.get("max_position_embeddings")
    return {
        "vocab_size": text_fact(target, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": widest(fields.get("intermediate_size")) or 3 * hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_groups if num_heads % num_groups == 0 else num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.get("rms_norm_eps") or 1e-6,
        # A target that was made for no length in particular leaves the drafter with its own default.
        **({"max_position_embeddings": length} if length else {}),
        # What layers of this width need to pass on what they get; a target of another width says less about it.
        "initializer_range": hidden_size**-0.5,
        "rope_parameters": rope_like(fields, head_dim),
        **{key: fields.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
