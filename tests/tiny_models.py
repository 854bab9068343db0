"""Tiny random targets of many architectures, and drafters that are right as often as a test wants."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hf_pardraft import DFlashDrafter, PardDrafter

VOCAB_SIZE = 64
MASK_TOKEN_ID = 63
# No special token: a random model that writes it by chance would end its text.
ARCHITECTURES = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralConfig, {"sliding_window": 6}),
    "gemma3": (
        Gemma3TextConfig,
        {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gpt_oss": (GptOssConfig, {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "phi3": (Phi3Config, {}),
}


def tiny_target(architecture: str = "qwen3", seed: int = 0, **overrides) -> PreTrainedModel:
    """A random model with weights large enough that its argmax is no near tie."""
    config_class, fields = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    config = config_class(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            **fields,
            **overrides,
        }
    )
    return AutoModelForCausalLM.from_config(config).eval()


def tiny_drafter(kind: str, target: PreTrainedModel, depth: int = 4, seed: int = 1):
    """An untrained drafter for `target` that drafts `depth` tokens a round."""
    vocab_size = target.config.get_text_config().vocab_size
    if kind == "pard":
        base = tiny_target("qwen3", seed=seed, vocab_size=vocab_size, num_hidden_layers=2)
        drafter = PardDrafter.from_causal_lm(base, mask_token_id=vocab_size - 1)
        drafter.generation_config.num_assistant_tokens = depth
        return drafter
    torch.manual_seed(seed)
    return DFlashDrafter.for_target(target, num_layers=2, block_size=depth + 1, mask_token_id=vocab_size - 1)


def make_oracle(drafter, continuation: torch.Tensor, rates: list[float], seed: int = 0):
    """Let `drafter` run as ever, but replace its logits: position k is right with probability `rates[k]`.

    Args:
        drafter: the drafter to change in place.
        continuation: `(length,)`, the whole text, prompt included, that the target will write.
        rates: one probability per draft position.
    """
    generator = torch.Generator().manual_seed(seed)
    real_draft = drafter.draft

    def draft(context, state, depth):
        logits = real_draft(context, state, depth)
        anchor = int(context.new_positions[0, -1])
        for k in range(depth):
            is_right = torch.rand((), generator=generator) < rates[k]
            truth = int(continuation[anchor + 1 + k]) if anchor + 1 + k < len(continuation) else 0
            token = truth if is_right else (truth + 1) % logits.shape[-1]
            logits[:, k] = 0.0
            logits[:, k, token] = 10.0
        return logits

    drafter.draft = draft
    return drafter


def random_prompt(length: int, seed: int = 0) -> torch.LongTensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE - 1, (1, length), generator=generator)
