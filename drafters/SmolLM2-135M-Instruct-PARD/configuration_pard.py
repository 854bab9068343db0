"""Configurations of PARD and PARD-2 drafters: those of an ordinary Llama, Qwen2 or Qwen3, plus the mask token."""

from typing import Any, ClassVar

from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from .base import PairedConfig


class PardConfig(PairedConfig):
    """What makes an ordinary causal LM's configuration a PARD drafter's (arXiv 2504.18583).

    `PardConfig(model_type="qwen3", pard_token=..., **qwen3_fields)` gives the class that belongs to the base
    architecture, and so does `PardConfig.from_pretrained`. `model_type` and `architectures` stay those of the base, so
    that transformers and vLLM load the checkpoint as what it is.

    Args:
        pard_token: id of the mask token that stands for every token not yet known.
        pard_tokens: one mask id for each place instead, m_0 to m_{K-2} (arXiv 2504.18583, section 4.3); then the
            drafter drafts at most one token more than there are. `pard_token`, all that other readers know of, is m_0.
            `None`, and not in config.json, where one id is shared.
        spd_type: "pard" or "pard2", as the published checkpoints have it.
        pard2_target_layers: PARD-2: which hidden states of the target it reads, as indices into its `hidden_states` tuple;
            negative ones count from the end, and -1 is taken after the final norm. `None` for PARD.
        pard2_target_dim: PARD-2: their width, side by side.
        pard2_scale: PARD-2: what the projected states are multiplied with (0.02, as published).
        pard2_proj_bias: PARD-2: whether the projection has a bias.
        draft_vocab_size: how many tokens the drafter proposes; `None`, and not in config.json, for all.
        **kwargs: as for [`PairedConfig`], what it was trained with, and for the base configuration. A PARD drafter serves every
            target of one model type, so it remembers no fingerprint of a target.
    """

    drafter_kind: ClassVar[str] = "pard"

    pard_token: int | None = None
    pard_tokens: list[int] | None = None
    spd_type: str = "pard"
    pard2_target_layers: list[int] | None = None
    pard2_target_dim: int | None = None
    pard2_scale: float | None = None
    pard2_proj_bias: bool | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # Published configs say it twice.
        kwargs.pop("pard2", None)
        if self.pard2_target_layers is not None:
            self.spd_type = "pard2"
        if self.pard_tokens and self.pard_token is None:
            self.pard_token = self.pard_tokens[0]
        super().__post_init__(**kwargs)

    def __new__(cls, *args: Any, model_type: str = "llama", **kwargs: Any) -> "PardConfig":
        if cls is PardConfig:
            cls = config_class_of(model_type)
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        if cls is PardConfig:
            return config_class_of(config_dict.get("model_type")).from_dict(config_dict, **kwargs)
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs: Any):
        if cls is PardConfig:
            config_dict, _ = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
            cls = config_class_of(config_dict.get("model_type"))
            return cls.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @property
    def mask_token_ids(self) -> list[int]:
        """The ids of all mask tokens: one that is shared, or one for each place."""
        return [self.pard_token] if self.pard_tokens is None else list(self.pard_tokens)

    def to_dict(self) -> dict[str, Any]:
        """As in `PreTrainedConfig`; a PARD drafter's has no fields of PARD-2, and none that is left open."""
        fields = super().to_dict()
        for name in ("pard_tokens", "draft_vocab_size"):
            if fields[name] is None:
                del fields[name]
        if self.pard2_target_layers is None:
            fields = {name: value for name, value in fields.items() if name not in PARD2_FIELDS}
        return fields

    def save_pretrained(self, save_directory, *args: Any, **kwargs: Any) -> None:
        """As in `PreTrainedConfig`; `architectures` names the base, so that other tools load it as a causal LM."""
        self.architectures = [BASE_ARCHITECTURES[self.model_type]]
        super().save_pretrained(save_directory, *args, **kwargs)


PARD2_FIELDS = (
    "pard2_target_layers",
    "pard2_target_dim",
    "pard2_scale",
    "pard2_proj_bias",
    "target_fingerprint",
)


class PardLlamaConfig(PardConfig, LlamaConfig):
    model_type = "llama"


class PardQwen2Config(PardConfig, Qwen2Config):
    model_type = "qwen2"


class PardQwen3Config(PardConfig, Qwen3Config):
    model_type = "qwen3"


BASE_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PARD_CONFIGS = {"llama": PardLlamaConfig, "qwen2": PardQwen2Config, "qwen3": PardQwen3Config}


def config_class_of(model_type: str | None) -> type[PardConfig]:
    """The PARD configuration class of a base architecture."""
    if model_type not in PARD_CONFIGS:
        raise ValueError(
            f"a PARD drafter is a {', '.join(PARD_CONFIGS)} causal LM, got model_type {model_type!r}: adapt a model of one of "
            "these architectures"
        )
    return PARD_CONFIGS[model_type]
