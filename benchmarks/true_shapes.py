"""Targets and drafters at their true shapes, and how often the papers say that they are right; see decode.py.

Nothing is downloaded: the shapes are those of the published config.json files, and the weights are random.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from acceptance_profile import AcceptanceProfile
from hf_pardraft import DartDrafter, DFlareDrafter, PardDrafter
from hf_pardraft.models.base import ParallelDrafter

QWEN3 = {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "eos_token_id": None,
}
LLAMA3 = {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
    "bos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PARD_MASK = 128020  # arXiv 2504.18583, table 4
QWEN_MASK = 151669
# arXiv 2601.19278, appendix D: 59 nodes, the 20 best prefixes of a level, 25 tokens after each.
DART_TREE = {"tree_budget": 59, "tree_beam_width": 20, "tree_top_k": 25, "tree_scoring": "dart"}


def qwen3_4b() -> Qwen3Config:
    return Qwen3Config(**QWEN3, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)


def qwen3_8b() -> Qwen3Config:
    return Qwen3Config(**QWEN3, hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False)


def llama_31_8b() -> LlamaConfig:
    rope = {**LLAMA3_ROPE, "factor": 8.0}
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}
    return LlamaConfig(**LLAMA3, **shape, rope_parameters=rope, tie_word_embeddings=False)


def llama_32_1b() -> LlamaConfig:
    rope = {**LLAMA3_ROPE, "factor": 32.0}
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    return LlamaConfig(**LLAMA3, **shape, rope_parameters=rope, tie_word_embeddings=True)


@dataclass(frozen=True)
class Published:
    """A drafter of a paper, simulated.

    Attributes:
        profile: how often it is right.
        depth: tokens that it drafts a round.
        source: where the profile is from, and what was made of it.
        speedup: the paper's own figure over plain decoding, and where it is from.
        tree: settings of the paper's tree; empty for a chain.
    """

    profile: AcceptanceProfile
    depth: int
    source: str
    speedup: str
    tree: dict[str, Any]


def falling(first: float, later: float, depth: int) -> AcceptanceProfile:
    """The first position is right with one probability, and each later one, if all before it are, with another."""
    return AcceptanceProfile(by_position=tuple(first * later**k for k in range(depth)))


# 1-alpha is that of the first position; later ones are such that the first four have 4-alpha on average.
PARD_FIRST, PARD_FOUR = (0.93 + 0.88) / 2, (0.90 + 0.85) / 2
PUBLISHED = {
    ("llama-3.1-8b", "PARD"): Published(
        falling(PARD_FIRST, (4 * PARD_FOUR - PARD_FIRST) / 3, 8),
        8,
        "arXiv 2504.18583, table 2 (section 4.2): means of HumanEval and GSM8K of 1-alpha (0.905) and 4-alpha (0.875), as the "
        "mean rate of the first four positions given those before them; table 4 has K = 8",
        "4.00x plain Transformers+ (compiled, A100): arXiv 2504.18583, table 7 (appendix F), average",
        {},
    ),
    ("qwen3-4b", "DFlare"): Published(
        AcceptanceProfile(tau=7.47),
        15,
        "arXiv 2606.02091, table 1: Qwen3-4B, temperature 0, average tau 7.47; no rates by position, so a "
        "geometric profile of that tau",
        "5.52x plain (H20): arXiv 2606.02091, table 1, average",
        {},
    ),
    ("qwen3-8b", "DFlare"): Published(
        AcceptanceProfile(tau=7.33),
        15,
        "arXiv 2606.02091, table 1: Qwen3-8B, temperature 0, average tau 7.33; no rates by position, so a "
        "geometric profile of that tau",
        "5.46x plain (H20): arXiv 2606.02091, table 1, average",
        {},
    ),
    ("qwen3-4b", "DART"): Published(
        AcceptanceProfile(tau=3.87),
        8,
        "arXiv 2601.19278, table 1: Qwen3-4B, temperature 0, mean tau 3.87, which is that of its trees, so a geometric profile "
        "of that tau stands for the best path of a tree (no n-gram model is looked up); as a chain it is right less often",
        "2.87x plain (H20-3e): arXiv 2601.19278, table 1, mean",
        DART_TREE,
    ),
}
CONFIGS = {"qwen3-4b": qwen3_4b, "qwen3-8b": qwen3_8b, "llama-3.1-8b": llama_31_8b}


def random_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of that shape, its weights drawn where they are to be."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def true_drafter(name: str, target: PreTrainedModel) -> ParallelDrafter:
    """An untrained drafter of the paper's shape."""
    device, dtype = target.device, target.dtype
    if name == "PARD":
        return PardDrafter.from_causal_lm(random_model(llama_32_1b(), device, dtype), mask_token_id=PARD_MASK).eval()
    with torch.device(device):
        if name == "DART":
            drafter = DartDrafter.for_target(target, draft_length=7)
        else:
            drafter = DFlareDrafter.for_target(target, num_layers=7, block_size=16, mask_token_id=QWEN_MASK)
    return drafter.to(device=device, dtype=dtype).eval()
