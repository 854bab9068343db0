"""How many tokens a target can read: where a table of positions, learned or sinusoidal, ends, nothing more is drafted."""

from transformers import PreTrainedConfig

# Families that name the size of their table in a way of their own.
NAMES = {"mpt": "max_seq_len", "whisper": "max_target_positions"}
# Families that compute further positions when they get there.
GROWING_FAMILIES = {"xglm"}


def is_rotary(config: PreTrainedConfig) -> bool:
    """Whether a target with this text config has rotary embeddings."""
    return vars(config).get("rope_parameters") is not None


def num_positions(config: PreTrainedConfig) -> int | None:
    """How many tokens a target with this text config can read; `None`: of rotary embeddings, and biases, there is no end."""
    if is_rotary(config) or config.model_type in GROWING_FAMILIES:
        return None
    usual = type(config).attribute_map.get("max_position_embeddings", "max_position_embeddings")
    return vars(config).get(NAMES.get(config.model_type, usual))


def room_before(end: int | None, length: int, depth: int) -> int:
    """How many of `depth` tokens may be drafted after a text of `length` tokens, the last of which is yet to be read.

    Args:
        end: how many tokens can be read, see [`num_positions`].
        length, depth: of the text and the draft.
    """
    return depth if end is None else max(0, min(depth, end - length))
