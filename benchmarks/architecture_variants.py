"""The variants of an architecture that the sweep tries: what its configuration lets one choose, and every type of RoPE."""

import inspect
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from architecture_cases import NEEDS, WINDOW, known_fields, registered, tiny_config

# Where the factors of long texts begin: texts of the sweep cross it.
BOUNDARY = 32
ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
SLIDING = ["sliding_attention", "full_attention"] * 2
FULL = ["full_attention"] * 4
# What else an architecture can be told to do.
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    **{
        name: {"windows": {"use_sliding_window": True, "max_window_layers": 2}}
        for name in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
    },
    "llama": {"tied": {"tie_word_embeddings": True}, "use_cache off": {"use_cache": False}},
    "llama4_text": {
        "temperature 8": {"floor_scale": 8, "no_rope_layers": [1, 0, 1, 0]},
        "temperature 16": {"floor_scale": 16, "no_rope_layers": [1, 0, 1, 0]},
        "no temperature": {"attn_temperature_tuning": False, "no_rope_layers": [1, 0, 1, 0]},
    },
    "falcon": {
        "alibi": {"alibi": True},
        "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "multi-head": {"multi_query": False},
    },
    "mpt": {"no alibi": {"attn_config": {"alibi": False}}},
    "gpt_bigcode": {"multi-head": {"multi_query": False}},
    "opt": {"narrow embedding": {"word_embed_proj_dim": 16}, "norm after": {"do_layer_norm_before": False}},
    "electra": {"narrow embedding": {"embedding_size": 16}},
    "gemma4_text": {
        "shared entries": {"num_kv_shared_layers": 2, "layer_types": SLIDING},
        "keys are values": {"attention_k_eq_v": True, "layer_types": SLIDING},
        "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "layer_types": SLIDING},
    },
    "gemma4_unified_text": {"shared entries": {"num_kv_shared_layers": 2, "layer_types": SLIDING}},
    "gemma3_text": {"both": {"layer_types": SLIDING}},
    "gemma3n_text": {"nothing shared": {"num_kv_shared_layers": 0}},
    "qwen4_exp_text": {
        "n-grams": {
            "ple_layer_ids": [1, 3],
            "ple_embed_dim": 32,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 100,
            "split_ngram_parts": 2,
            "make_ngram_vocab_size_divisible_by": 2,
        }
    },
    "granitemoehybrid": {
        "attention only": {"layer_types": FULL},
        "rope": {"position_embedding_type": "rope"},
        "time step limit": {"time_step_limit": (0.1, 0.5)},
    },
    "bamba": {"time step limit": {"time_step_limit": (0.1, 0.5)}},
    "nemotron_h": {
        "no time step limit": {"time_step_min": 1e-12},
        "attention only": {"layers_block_type": ["full_attention", "mlp"] * 2},
        "recurrent and attention": {
            "layers_block_type": ["linear_attention", "full_attention"] * 2,
            "time_step_min": 1e-12,
        },
    },
    "doge": {"experts": {"is_moe": True, "num_experts": 4, "num_experts_per_tok": 2}},
    "stablelm": {"parallel": {"use_parallel_residual": True, "qk_layernorm": True}},
    "gpt_neox": {"serial": {"use_parallel_residual": False}},
    "persimmon": {"no norm": {"qk_layernorm": False}},
    "cohere": {"norm": {"use_qk_norm": True}},
    "olmo": {"clipped": {"clip_qkv": 1.0}},
    "zaya": {"windows": {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window": WINDOW}},
    "zamba2": {"rope": {"use_mem_rope": True}, "two blocks": {"num_mem_blocks": 2}},
    "mistral": {"full": {"sliding_window": None}},
    "mixtral": {"full": {"sliding_window": None}},
    "starcoder2": {"full": {"sliding_window": None}},
    "phi3": {"full": {"sliding_window": None}},
    "phimoe": {"full": {"sliding_window": None}},
    "deepseek_v3": {"groups": {"n_group": 2, "topk_group": 1}, "no query rank": {"q_lora_rank": None}},
    "deepseek_v2": {"groups": {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}},
    "ministral3": {
        "temperature": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.5,
                "max_position_embeddings": 16,
            }
        }
    },
    "inkling_text": {"log scaling": {"log_scaling_n_floor": 8}},
    "inkling2_text": {"log scaling": {"log_scaling_n_floor": 8}},
    "xlnet": {"uni": {"attn_type": "uni"}},
    "reformer": {"local": {"attn_layers": ["local"] * 4}},
    "hrm_text": {"no prefix": {"prefix_lm": False}},
    "big_bird": {"full": {"attention_type": "original_full"}},
    "bigbird_pegasus": {"full": {"attention_type": "original_full"}},
}


def variants_of(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of variants of a model type, and the fields by which they differ; `_attention` is the attention implementation."""
    yield "default", {}
    yield "eager attention", {"_attention": "eager"}
    yield from CHOICES.get(name, {}).items()
    yield from window_variants(registered()[name])
    yield from rope_variants(name)


def window_variants(config_class: type[PreTrainedConfig]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each layer may be of full attention or with a window."""
    names = known_fields(config_class)
    source = inspect.getsource(inspect.getmodule(config_class))
    if not {"layer_types", "sliding_window"} <= names or "sliding_attention" not in source:
        return
    switch = {"use_sliding_window": True} if "use_sliding_window" in names else {}
    yield "half windows", {"layer_types": SLIDING, **switch}
    yield "no windows", {"layer_types": FULL, **switch}
    yield "all windows", {"layer_types": ["sliding_attention"] * 4, **switch}


def rope_variants(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each type of RoPE, where the configuration has a choice."""
    try:
        config = tiny_config(name)
        text = config.get_text_config(decoder=True)
        given = dict(text.rope_parameters)
        rotary_dims = {key: rotary_dim(text, given, key) for key in given}
    except Exception:  # noqa: BLE001
        # A configuration that can't be built shows in its other variants; without parameters there is nothing to choose.
        return
    section = next((key for key in type(config).sub_configs if vars(config).get(key) is text), None)
    has_own_limit = "original_max_position_embeddings" in known_fields(type(text))
    for rope_type in ROPE_TYPES if given else ():
        if all(isinstance(value, dict) for value in given.values()):
            changed = {key: rope(rope_type, rotary_dims[key], given[key]) for key in given}
        else:
            changed = rope(rope_type, next(iter(rotary_dims.values())), given)
        fields = {"rope_parameters": changed}
        if rope_type == "dynamic":
            fields["max_position_embeddings"] = BOUNDARY
        if rope_type == "longrope" and has_own_limit:
            fields["original_max_position_embeddings"] = BOUNDARY
        if section is not None:
            fields = {section: {**NEEDS.get(name, {}).get(section, {}), **fields}}
        yield f"rope {rope_type}", fields


def rope(rope_type: str, rotary_dim: int, given: dict[str, Any]) -> dict[str, Any]:
    """RoPE parameters of a type, whose factors change at `BOUNDARY` if they change anywhere."""
    fields = {
        key: given[key] for key in ("partial_rotary_factor", "mrope_section", "mrope_interleaved") if key in given
    }
    fields |= {"rope_type": rope_type, "rope_theta": 1e4}
    if rope_type not in ("default", "proportional"):
        fields["factor"] = 4.0
    if rope_type in ("yarn", "longrope", "llama3"):
        fields["original_max_position_embeddings"] = BOUNDARY
    if rope_type == "llama3":
        fields |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope_type == "longrope":
        steps = range(rotary_dim // 2)
        fields |= {"short_factor": [1.0 for _ in steps], "long_factor": [2.0 + step for step in steps]}
    return fields


def rotary_dim(config: PreTrainedConfig, given: dict[str, Any], layer_type: str) -> int:
    """How many dimensions of a head are rotated, in the layers of a type if `given` has parameters for each."""
    if (latent := vars(config).get("qk_rope_head_dim")) is not None:
        return latent
    parameters = given[layer_type] if isinstance(given[layer_type], dict) else given
    try:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    except RuntimeError:
        # Layers differ, and then transformers refuses to say.
        head_dim = config.per_layer_config[layer_type].head_dim
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))
