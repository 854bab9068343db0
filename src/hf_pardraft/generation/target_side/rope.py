"""Rotary embeddings whose frequencies depend on the longest position of a forward, and how far one may draft beside them.

With `rope_type` "longrope" a forward rotates all of its tokens by one of two sets of frequencies: the long one, if its longest
text has more than `original_max_position_embeddings` tokens. With "dynamic" each forward over more than
`max_position_embeddings` tokens has a set of its own. Entries that are in the cache stay as they were rotated. Plain `generate`
reads one token per forward, so a forward over a draft rotates as plain `generate` does while all of its slots are on one side.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig


@dataclass(frozen=True)
class RopeChanges:
    """Lengths of text, in tokens, at which a target's rotary frequencies change.

    Attributes:
        switches: a forward whose longest text has more tokens than one of these rotates otherwise than a shorter one.
        grows_beyond: from this length on it rotates otherwise with each further token; `None` if it never does.
    """

    switches: tuple[int, ...] = ()
    grows_beyond: int | None = None

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self.switches) or self.grows_beyond is not None

    def room(self, length: int, depth: int) -> int:
        """How many tokens may be drafted after a text of `length` tokens, of `depth` that were asked for.

        No slot, nor the bonus token after the last one, comes to stand beyond a change that the text has not reached.
        """
        if self.grows_beyond is not None and length >= self.grows_beyond:
            return 0
        ahead = [limit for limit in (*self.switches, self.grows_beyond) if limit is not None and limit >= length]
        return max(0, min([depth, *(limit - 1 - length for limit in ahead)]))

    def are_met(self, shortest: int, longest: int) -> bool:
        """Whether texts of `shortest` to `longest` tokens are rotated in more than one way."""
        grows = self.grows_beyond is not None and longest > self.grows_beyond
        return grows or any(shortest <= limit < longest for limit in self.switches)


NO_CHANGES = RopeChanges()


def rope_changes(config: PreTrainedConfig) -> RopeChanges:
    """Where the frequencies of a target with this text config change."""
    switches: set[int] = set()
    grows_beyond = None
    for rope in rope_parameters(config):
        rope_type = str(rope.get("rope_type", "default"))
        # Phi-3.5-MoE scales cosine and sine by one of two numbers, whatever the type of its frequencies.
        if rope_type == "longrope" or "long_mscale" in rope:
            switches.add(int(rope["original_max_position_embeddings"]))
        if "dynamic" in rope_type:
            grows_beyond = int(config.max_position_embeddings)
    return RopeChanges(tuple(sorted(switches)), grows_beyond)


def rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """The rope parameters of a text config: one set, or one per layer type."""
    given = vars(config).get("rope_parameters") or {}
    if "rope_type" in given:
        yield given
    else:
        yield from (rope for rope in given.values() if isinstance(rope, dict))


def longest_text(positions: torch.LongTensor | None, num_columns: int) -> int:
    """How many tokens the longest text of a prompt has, as rotary embeddings count them.

    Args:
        positions: `(batch, columns)` or, of a target with several per token, `(axes, batch, columns)`.
        num_columns: of the prompt, which counts where the target takes no positions.
    """
    return num_columns if positions is None else int(positions.max()) + 1
