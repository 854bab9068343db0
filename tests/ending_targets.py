"""Tiny targets that end their texts by themselves, prompts for them, and what a batch makes of these."""

import torch

from hf_pardraft.datagen.refilled_batch import Item, RefilledBatch
from tiny_models import tiny_target

END = 2


def ending_target(architecture, **overrides):
    """Ends its texts after some ten tokens, and writes no other special ones."""
    return with_ends(tiny_target(architecture, vocab_size=299, **overrides))


def with_ends(target):
    head = target.get_output_embeddings()
    bias = torch.zeros(head.out_features)
    bias[END], bias[[0, 1]] = 3.0, -100.0
    head.bias = torch.nn.Parameter(bias)
    target.generation_config.eos_token_id = END
    return target


def ragged_prompts(num_rows: int, vocab_size: int, length: int | None = None) -> list[list[int]]:
    """Prompts of many lengths, or all of one."""
    generator = torch.Generator().manual_seed(0)
    lengths = [length or 3 + 7 * row % 23 for row in range(num_rows)]
    return [torch.randint(3, vocab_size, (count,), generator=generator).tolist() for count in lengths]


def texts_of(batch: RefilledBatch, waiting: list[Item]) -> dict[int, list[int]]:
    """What a batch writes after all that is waiting, by row."""
    texts = {}
    while waiting or batch.items:
        batch.refill(waiting)
        assert len(batch.items) <= batch.most_items
        texts |= {item.row: item.written for item in batch.write_on()}
    return texts
