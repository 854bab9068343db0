"""Drafters that read one target's hidden states and borrow its embedding, so that they fit this target and no other."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from .drafting import ParallelDrafter, load_generation_config
from .pairing import other_weights_reason


class TargetBoundDrafter(ParallelDrafter):
    """What [`ParallelDrafter`] is, of a drafter as wide as its target (`hidden_size`, `target_hidden_size` of its config)."""

    @property
    def reads_target(self) -> bool:
        return True

    def get_input_embeddings(self) -> None:
        """There are none of its own, and what shards or saves a model is not to look for them."""
        return

    def check_target(self, target: PreTrainedModel, taps: list[int] | None = None) -> None:
        """See [`ParallelDrafter.check_target`]; the widths must agree too."""
        width = target.config.get_text_config(decoder=True).hidden_size
        expected = {self.config.hidden_size, self.config.target_hidden_size}
        if expected != {width}:
            raise ValueError(
                f"the drafter has hidden size {self.config.hidden_size} and reads hidden states of size "
                f"{self.config.target_hidden_size}, but the target's are of size {width}: it borrows the target's embedding, so "
                f"all must agree. Make a drafter for this target with {type(self).__name__}.for_target"
            )
        super().check_target(target, taps)

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


def with_common_names(config: PreTrainedConfig) -> dict[str, Any]:
    """A config as a dict, in which what an older family calls by a name of its own (`n_head`) has the common name too."""
    fields = config.to_dict()
    return fields | {common: fields[own] for common, own in config.attribute_map.items() if own in fields}


def layer_width(intermediate_size: int | list[int] | None) -> int | None:
    """The width of a target's MLPs; of the widest, where each layer has its own (Gemma 3n)."""
    return max(intermediate_size) if isinstance(intermediate_size, (list, tuple)) else intermediate_size


def architecture_like(target: dict[str, Any]) -> dict[str, Any]:
    """Fields of a Llama or Qwen3 configuration whose layers are as wide as those of a target (its config as a dict)."""
    num_heads = target["num_attention_heads"]
    rope = target.get("rope_parameters") or {"rope_type": "default", "rope_theta": target.get("rope_theta", 10000.0)}
    # Models with several layer types keep one rope per type; the drafter's layers are of full attention.
    rope = dict(rope.get("full_attention", rope))
    rope.setdefault("rope_type", "default")
    # The drafter rotates whole heads, so factors that fit a part of a head are of no use to it.
    if rope.pop("partial_rotary_factor", 1.0) != 1.0 and rope["rope_type"] == "longrope":
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": layer_width(target.get("intermediate_size")) or 3 * target["hidden_size"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": target.get("num_key_value_heads") or num_heads,
        "head_dim": target.get("head_dim") or target["hidden_size"] // num_heads,
        "rms_norm_eps": target.get("rms_norm_eps") or 1e-6,
        "max_position_embeddings": target["max_position_embeddings"],
        # What layers of this width need to pass on what they get; a target of another width says less about it.
        "initializer_range": target["hidden_size"] ** -0.5,
        "rope_parameters": rope,
        **{key: target.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
