"""Tiny random targets with recurrent layers, such whose rotary embeddings change within a text, and Llama 4's."""

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    Llama4TextConfig,
    PhimoeConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tiny_models import VOCAB_SIZE, tiny_target

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
HYBRIDS = {
    "qwen3_next": (Qwen3NextConfig, {**LINEAR, **EXPERTS}),
    "qwen3_5": (Qwen3_5TextConfig, LINEAR),
    "lfm2": (Lfm2Config, {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
}


def hybrid_target(name):
    config_class, fields = HYBRIDS[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(**SIZES, **fields)).eval()


ROPE_LIMIT = 32
LONGROPE = {
    "rope_type": "longrope",
    "factor": 8.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": ROPE_LIMIT,
    "rope_theta": 1e4,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


def phimoe():
    torch.manual_seed(0)
    config = PhimoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        initializer_range=0.2,
        original_max_position_embeddings=ROPE_LIMIT,
        rope_parameters={**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.3},
        pad_token_id=0,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval()


ROPE_TARGETS = {
    "longrope": lambda: tiny_target("llama", rope_parameters=LONGROPE),
    "dynamic": lambda: tiny_target("llama", max_position_embeddings=ROPE_LIMIT, rope_parameters=DYNAMIC),
    "phi3": lambda: tiny_target("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=ROPE_LIMIT),
    "phi3 with a window": lambda: tiny_target(
        "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=ROPE_LIMIT, sliding_window=9
    ),
    "phimoe": phimoe,
}


def llama4(**fields):
    """Llama 4's text model, with two experts."""
    torch.manual_seed(0)
    config = Llama4TextConfig(**SIZES, intermediate_size_mlp=48, num_local_experts=2, **fields)
    return AutoModelForCausalLM.from_config(config).eval()


def fresh(target):
    """A copy: with "dynamic", a target remembers the longest text that it has seen."""
    return copy.deepcopy(target)
