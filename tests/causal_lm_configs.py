"""A tiny configuration of every class that transformers maps to a causal language model."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

# Taken by a class that has a field of the name, so that no class gets one that it never had.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "decoder_layers", "num_decoder_layers", "n_layer"), 4),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "decoder_attention_heads", "encoder_attention_heads", "n_head"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_target_positions", "max_source_positions"), 64),
    **dict.fromkeys(("n_group", "topk_group", "bos_token_id"), 1),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "vocab_size": 64,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "is_decoder": True,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
RECURRENT = ["linear_attention", "full_attention"] * 2
TEXT = {
    name: SIZES[name]
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
}
# What doesn't follow from the sizes, by the name of the configuration.
NEEDED = {
    "BailingHybridConfig": {"layer_types": RECURRENT},
    "BambaConfig": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "Dots1Config": {"n_shared_experts": 1},
    "Dots3NoteTextConfig": {"num_key_value_heads": 4},
    "FuyuConfig": {"text_config": {"model_type": "persimmon", **TEXT}},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nTextConfig": {
        "layer_types": ALTERNATING,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 64,
        "activation_sparsity_pattern": None,
    },
    "Gemma4TextConfig": {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64},
    "Glm4MoeLiteConfig": {"head_dim": 8},
    "GotOcr2Config": {"text_config": {"model_type": "qwen2", **TEXT}},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["mamba", "attention"] * 2},
    "KimiLinearConfig": {"layer_types": RECURRENT, "linear_head_dim": 8, "linear_num_heads": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "LongcatFlashConfig": {"num_layers": 4, "head_dim": 8},
    "Mamba2Config": {"num_heads": 4, "head_dim": 16},
    "MossTranscribeDiarizeConfig": {"text_config": {"model_type": "qwen3", **TEXT}},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "ReformerConfig": {
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [16, 16],
    },
    "XLNetConfig": {"d_head": 8},
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4, "mamba_headdim": 16},
    "ZambaConfig": {"num_hidden_layers": 7, "attn_layer_period": 2, "attn_layer_offset": 0},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
# transformers itself can't build these as a causal LM from such fields, or not without another package.
UNBUILT = {
    "CohereCompassTextConfig",
    "DbrxConfig",
    "Dots3NoteConfig",
    "Gemma3nConfig",
    "Gemma4AssistantConfig",
    "Gemma4UnifiedAssistantConfig",
    "MusicgenConfig",
    "MusicgenMelodyConfig",
}
CONFIG_CLASSES = {config.__name__: config for config in MODEL_FOR_CAUSAL_LM_MAPPING if config.__name__ not in UNBUILT}


def tiny_config(config_class: type[PreTrainedConfig], **overrides) -> PreTrainedConfig:
    """A configuration of a class, with each of its own fields that `SIZES` knows, whatever it calls them."""
    default = config_class()
    names, own_names = {*default.to_dict(), *default.attribute_map}, {*default.attribute_map.values()}
    fields = {name: size for name, size in SIZES.items() if name in names - own_names}
    if "qk_rope_head_dim" in fields:
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = 4
    for name, part in default.sub_configs.items():
        is_class = part is not PreTrainedConfig and issubclass(part, PreTrainedConfig)
        fields[name] = tiny_config(part).to_dict() if is_class else {}
    return config_class(**{**fields, **NEEDED.get(config_class.__name__, {}), **overrides})


def tiny_causal_lm(name: str, device: str = "cpu", **overrides) -> PreTrainedModel:
    """A model of the configuration class of this name, with random weights, or none on the meta device."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(tiny_config(CONFIG_CLASSES[name], **overrides)).eval()
