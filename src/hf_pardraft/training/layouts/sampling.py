"""What of an example is trained in an epoch, at random: the rows that COD keeps, and anchors.

Randomness depends on the seed, the epoch and the example, not on the order of calls, so that a resumed run sees the batches of
an unbroken one.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch


class SharedEpoch:
    """An attribute whose value copies of an object share, in other processes too: a data loader's workers hold such copies, and
    persistent ones live for many epochs."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_shared_{name}"

    def __get__(self, instance: Any, owner: type) -> "int | SharedEpoch":
        if instance is None:
            return self
        return int(vars(instance)[self.name])

    def __set__(self, instance: Any, value: int) -> None:
        if self.name not in vars(instance):
            vars(instance)[self.name] = torch.tensor(0).share_memory_()
        vars(instance)[self.name].fill_(value)


def example_generator(seed: int, epoch: int, input_ids: Sequence[int]) -> torch.Generator:
    """A random generator that depends on these three alone."""
    content = torch.as_tensor(input_ids, dtype=torch.int64).numpy().tobytes()
    # A CPU generator looks at 32 bits of its seed only, so all three have to be mixed into them.
    return torch.Generator().manual_seed(zlib.crc32(content, zlib.crc32(f"{seed} {epoch}".encode())))


def some_of(candidates: torch.LongTensor, most: int | None, generator: torch.Generator) -> torch.LongTensor:
    """At most `most` of the candidates, in their order; all of them if `None`."""
    chosen = torch.randperm(len(candidates), generator=generator)[:most]
    return candidates[chosen.sort().values]


def conditional_drop(
    predicts: torch.BoolTensor, num_tokens: int, retention: float, min_retention: float, generator: torch.Generator
) -> list[torch.LongTensor]:
    """COD: which positions each subtask keeps (arXiv 2504.18583, section 3.2.2 and algorithm 1).

    Block 0 keeps every position that predicts something. Block j keeps N max(r^j, r_min) of those whose left neighbour
    block j - 1 kept, so the masks before a kept row are all there: its keys and values are whole. N counts supervised
    positions only, and a chain that meets an unsupervised one ends there.

    Args:
        predicts: `(length,)`, see [`predicts_supervised`].
        num_tokens: K, the number of subtasks.
        retention, min_retention: r and r_min of eq. 11.
        generator: where the randomness comes from.

    Returns:
        One ascending `(kept,)` index tensor per block 0..K-1.
    """
    kept = [predicts.nonzero()[:, 0]]
    for block in range(1, num_tokens):
        candidates = kept[-1] + 1
        candidates = candidates[candidates < len(predicts)]
        candidates = candidates[predicts[candidates]]
        quota = int(len(kept[0]) * max(retention**block, min_retention))
        if len(candidates) > quota:
            candidates = some_of(candidates, quota, generator)
        kept.append(candidates)
    return kept
