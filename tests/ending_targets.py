"""Tiny targets that end their texts by themselves."""

import torch

from tiny_models import tiny_target

END = 2


def ending_target(architecture):
    """Ends its texts after some ten tokens, and writes no other special ones."""
    return with_ends(tiny_target(architecture, vocab_size=299))


def with_ends(target):
    head = target.get_output_embeddings()
    bias = torch.zeros(head.out_features)
    bias[END], bias[[0, 1]] = 3.0, -100.0
    head.bias = torch.nn.Parameter(bias)
    target.generation_config.eos_token_id = END
    return target
