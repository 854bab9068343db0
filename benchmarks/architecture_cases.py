"""Tiny random targets of every architecture that transformers registers for causal language modelling, and their variants.

A configuration is made from its class's own fields (`TINY` says how small each becomes, sub-configurations included), with what
an architecture needs besides in `NEEDS`. Weights are drawn anew, of one scale for all architectures, so that greedy text varies.
"""

import inspect
import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 96
LAYERS = 4
WINDOW = 6

TINY: dict[str, Any] = {
    # widths
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_dim", "lru_width"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "input_embedding_size", "attention_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("n_inner", "dff", "dim_ff", "d_inner", "feed_forward_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("dense_intermediate_size", "prefix_dense_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 16),
    "shared_experts_intermediate_size": 16,
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_query_groups", "linear_num_key_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "dim_head", "d_head", "d_kv", "swa_head_dim", "linear_head_dim", "global_head_dim"), 8
    ),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "attention_head_size", "kv_channels"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 8),
    "linear_num_heads": 4,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "gated_norm_rank", "adapter_rank"), 16),
    "qk_head_dim": 16,
    # layers
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks"), LAYERS),
    # vocabulary
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB_SIZE
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 256),
    **dict.fromkeys(("model_max_length", "context_length"), 256),
    # windows
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("local_attention", "attention_chunk_size", "keep_window_size"), WINDOW),
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # indexers: fewer keys than a prompt has tokens
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    # recurrent layers
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    # vision and sound, which no case here uses
    "image_size": 28,
    "patch_size": 14,
    "num_mel_bins": 16,
    "depth": 1,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "is_decoder": True,
}

# Of embeddings, of matrices, and of what is added to gains and biases: the first that makes an architecture's text vary is taken.
SCALES = ((0.5, 1.5, 0.1), (0.1, 2.5, 0.3), (1.0, 1.0, 0.5), (0.02, 4.0, 0.5))
LEFT_ALONE = ("A_log", "dt_bias", "time_", ".D", "lambda", "a_param", "recurrent_param", "decay", "dt_proj.bias")
MOST_WEIGHTS = 5_000_000

# What a class needs besides: fields that depend on others, and those that no other class has.
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT_HEADS = {"num_key_value_heads": 4}
DOTS = {
    **LATENT_HEADS,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
ALTERNATING = ["linear_attention", "full_attention"] * 2
SMALL_VISION = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 32}
NEEDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), LATENT_HEADS),
    **dict.fromkeys(("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), LATENT_HEADS),
    "dots3_note_text": DOTS,
    "dots3_note": {
        "text_config": DOTS,
        "vision_config": {**SMALL_VISION, "adapter_in_dim": 32, "adapter_out_dim": 32, "mlp_layer_types": ["dense"]},
        "audio_config": {**SMALL_VISION, "adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "bailing_hybrid": {**LATENT_HEADS, "layer_group_size": 2, "num_expert_group": 1},
    "kimi_linear": {**LATENT_HEADS, "layer_types": ALTERNATING},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ALTERNATING},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mpt": {"use_cache": True},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8},
    "zamba": {
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 2,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "xmod": {"default_language": "en_XX"},
    "roc_bert": {"shape_vocab_size": 100, "pronunciation_vocab_size": 100},
    "qwen4_exp_text": INDEXER,
    "qwen4_exp": {"text_config": INDEXER},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_top_k": 2},
    },
    "reformer": {
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "moshi": {"audio_vocab_size": 64, "num_codebooks": 2},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        }
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "qk_dim_factor": 1.0, "num_heads": 4, "chunk_size": 16},
    "fuyu": {"text_config": {"model_type": "persimmon", **TEXT}},
    "got_ocr2": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**SMALL_VISION, "mlp_dim": 32, "output_channels": 16, "global_attn_indexes": [0]},
    },
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3", "head_dim": 8, **TEXT}},
    "gemma3": {
        "vision_config": {"model_type": "siglip_vision_model", **SMALL_VISION, "image_size": 28, "patch_size": 14}
    },
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32}},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "patcher_config": {"num_hidden_layers": 1},
    },
}


def registered() -> dict[str, type[PreTrainedConfig]]:
    """All model types of transformers that `AutoModelForCausalLM` knows, and their configurations."""
    known = [config for config in AutoModelForCausalLM._model_mapping if config.__module__.startswith("transformers.")]
    found = {config_class.model_type: config_class for config_class in known}
    return dict(sorted(found.items()))


def tiny_fields(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a tiny configuration; `overrides` of a sub-configuration are a dict under its name."""
    fields = {name: TINY[name] for name in sorted(known_fields(config_class) & TINY.keys())}
    nested = {
        name: sub_class
        for name, sub_class in config_class.sub_configs.items()
        if "Auto" not in sub_class.__name__ and sub_class is not PreTrainedConfig
    }
    fields |= {name: value for name, value in overrides.items() if name not in nested}
    return fields | {name: tiny_fields(nested[name], overrides.get(name, {})) for name in nested}


def known_fields(config_class: type[PreTrainedConfig]) -> set[str]:
    """The names of a configuration's own fields."""
    names = set()
    for base in config_class.__mro__:
        names |= vars(base).get("__annotations__", {}).keys()
        if "__init__" in vars(base):
            names |= inspect.signature(base.__init__).parameters.keys()
    return names


def tiny_config(name: str, overrides: dict[str, Any] | None = None) -> PreTrainedConfig:
    """The tiny configuration of a registered model type; `overrides` are fields of it."""
    config_class = registered()[name]
    return config_class(**tiny_fields(config_class, {**NEEDS.get(name, {}), **(overrides or {})}))


def meta_model(name: str, overrides: dict[str, Any] | None = None) -> PreTrainedModel:
    """The same as a model without weights, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(name, overrides)).eval()


def tiny_model(name: str, overrides: dict[str, Any] | None = None, seed: int = 0) -> PreTrainedModel:
    """A tiny random target of a registered model type.

    Args:
        name: the model type.
        overrides: fields of its configuration; `_attention` is the attention implementation.
        seed: of the weights; chooses their scale, too.

    Raises:
        MemoryError: if it is not tiny.
        Exception: whatever transformers says of a configuration that it can't build.
    """
    overrides = dict(overrides or {})
    attention = overrides.pop("_attention", None)
    size = sum(parameter.numel() for parameter in meta_model(name, overrides).parameters())
    if size > MOST_WEIGHTS:
        raise MemoryError(f"{size} weights are not tiny: say in NEEDS what is to be small")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name, overrides), dtype=torch.float32).eval()
    draw_weights(model, *SCALES[seed % len(SCALES)])
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def draw_weights(model: PreTrainedModel, embedding: float, matrix: float, vector: float) -> None:
    """Weights of one scale whatever the architecture, so that texts vary; what recurrences are stable by is left as it is."""
    for name, parameter in model.named_parameters():
        if any(word in name for word in LEFT_ALONE) or not parameter.is_floating_point():
            continue
        with torch.no_grad():
            if parameter.ndim >= 2:
                is_embedding = any(word in name for word in ("emb", "wte", "wpe"))
                parameter.normal_(std=embedding if is_embedding else matrix / math.sqrt(parameter.shape[-1]))
            elif name.endswith("bias"):
                parameter.normal_(std=vector)
            else:
                parameter.add_(torch.randn_like(parameter) * vector)
