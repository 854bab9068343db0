"""Drafters that read one target's hidden states and borrow its embedding, so that they fit this target and no other."""

from typing import Any, ClassVar, NoReturn

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .base import ParallelDrafter, load_generation_config
from .pairing import other_weights_reason
from .tap_checks import check_borrowed, check_can_be_tapped, check_tapped_states, text_fact

DEFAULT_THETA = 10000.0


class TargetBoundDrafter(ParallelDrafter):
    """What [`ParallelDrafter`] is, of a drafter as wide as its target (`hidden_size`, `target_hidden_size` of its config).

    Attributes:
        has_own_head: whether it does without the target's head.
    """

    has_own_head: ClassVar[bool] = False

    @property
    def reads_target(self) -> bool:
        return True

    def get_input_embeddings(self) -> None:
        """There are none of its own, and what shards or saves a model is not to look for them."""
        return

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a `ValueError`: such a drafter can't go on from a text without the target's states of it."""
        raise ValueError(
            f"a {type(self).__name__} drafts from a target's hidden states, and writes no text by itself: call "
            "target.generate(..., assistant_model=drafter)"
        )

    def check_target(self, target: PreTrainedModel, taps: list[int] | None = None) -> None:
        """See [`ParallelDrafter.check_target`]; the widths must agree too."""
        width = text_fact(target, "hidden_size")
        expected = {self.config.hidden_size, self.config.target_hidden_size}
        if expected != {width}:
            raise ValueError(
                f"the drafter has hidden size {self.config.hidden_size} and reads hidden states of size "
                f"{self.config.target_hidden_size}, but the target's are of size {width}: it borrows the target's embedding, so "
                f"all must agree. Make a drafter for this target with {type(self).__name__}.for_target"
            )
        check_borrowed(type(self).__name__, target, self.has_own_head)
        super().check_target(target, taps)

    @classmethod
    def check_can_serve(cls, target: PreTrainedModel) -> None:
        """Raise a `ValueError` if no drafter of this kind can draft for `target`, whatever its configuration."""
        check_can_be_tapped(cls.__name__, target)
        check_borrowed(cls.__name__, target, cls.has_own_head)

    def check_tapped_states(self, target: PreTrainedModel) -> None:
        """See [`~.tap_checks.check_tapped_states`]."""
        check_tapped_states(type(self).__name__, target, self.taps_for(target))

    def other_target_reason(self, target: PreTrainedModel) -> str | None:
        """Such a drafter reads the hidden states of one model, so any other weights count as another target."""
        return other_weights_reason(self.config, target)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args: Any, **kwargs: Any):
        """As in `PreTrainedModel`, generation config included; every weight must be there."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.generation_config = load_generation_config(pretrained_model_name_or_path, **kwargs)
        return loaded


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
