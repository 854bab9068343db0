"""What the host gets to know of a round, in one transfer."""

import torch

from .tree.verify import Acceptance, check_has_law


def paths_on_host(acceptance: Acceptance) -> tuple[list[list[int]], list[list[int]]]:
    """For each row the accepted slots, the root's first, and the tokens to commit (as many), in one transfer."""
    return paths_of(for_host(acceptance).tolist(), acceptance.tokens.shape[1])


def for_host(acceptance: Acceptance) -> torch.LongTensor:
    """What the host wants to know, `(batch, ...)`: the number of accepted nodes, the tokens, and the path, if there is one."""
    parts = [acceptance.num_accepted[:, None], acceptance.tokens]
    if acceptance.path is not None:
        parts.append(acceptance.path)
    return torch.cat(parts, dim=1)


def paths_of(rows: list[list[int]], num_slots: int) -> tuple[list[list[int]], list[list[int]]]:
    """What rows of [`for_host`] say of so many slots; returns as [`paths_on_host`].

    Raises:
        RuntimeError: where a token could not be drawn.
    """
    paths, tokens = [], []
    for num_accepted, *rest in rows:
        slots = rest[num_slots:] or range(num_slots)
        paths.append(list(slots[: num_accepted + 1]))
        tokens.append(rest[: num_accepted + 1])
        check_has_law(tokens[-1])
    return paths, tokens


class HostCopy:
    """A tensor on its way to the host, which need not wait for it yet."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.event = values, None
        if values.is_cuda:
            self.values, self.event = values.to("cpu", non_blocking=True), torch.cuda.Event()
            self.event.record()

    def rows(self) -> list[list[int]]:
        """The values, once they have arrived."""
        if self.event is not None:
            self.event.synchronize()
        return self.values.tolist()
