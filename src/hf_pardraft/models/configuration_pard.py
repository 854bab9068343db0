"""Configurations of PARD drafters: those of an ordinary Llama, Qwen2 or Qwen3, plus the mask token."""

from typing import Any, ClassVar

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config


class PardConfig(PreTrainedConfig):
    """What makes an ordinary causal LM's configuration a PARD drafter's (arXiv 2504.18583).

    `PardConfig(model_type="qwen3", pard_token=..., **qwen3_fields)` gives the class that belongs to the base
    architecture, and so does `PardConfig.from_pretrained`. `model_type` and `architectures` stay those of the base, so
    that transformers and vLLM load the checkpoint as what it is.

    Args:
        pard_token: id of the mask token that stands for every token not yet known.
        spd_type: "pard", as the published checkpoints have it.
        target_model_type: model type of the targets that it was trained for, or `None` if unknown.
    """

    drafter_kind: ClassVar[str] = "pard"

    pard_token: int | None = None
    spd_type: str = "pard"
    target_model_type: str | None = None

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

    def save_pretrained(self, save_directory, *args: Any, **kwargs: Any) -> None:
        """As in `PreTrainedConfig`; `architectures` names the base, so that other tools load it as a causal LM."""
        self.architectures = [BASE_ARCHITECTURES[self.model_type]]
        super().save_pretrained(save_directory, *args, **kwargs)


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
