"""How good the drafts are, gathered on the device while a drafter trains, and read when something is logged. Pure counts."""

import torch


def chain_is_right(
    is_right: torch.BoolTensor,
    blocks: torch.LongTensor,
    positions: torch.LongTensor,
    num_blocks: int,
    num_positions: int,
) -> torch.BoolTensor:
    """Whether a row and all rows of its draft before it are right: what verification needs to get that far.

    Args:
        is_right, blocks, positions: `(rows,)`; positions from 1. A draft that has a row has all rows before it.
        num_blocks, num_positions: bounds of the two.

    Returns:
        `(rows,)`.
    """
    slots = blocks * num_positions + positions - 1
    grid = torch.ones(num_blocks * num_positions, dtype=torch.bool, device=is_right.device)
    grid[slots] = is_right
    return grid.view(num_blocks, num_positions).cumprod(dim=1).bool().flatten()[slots]


class DraftMetrics:
    """Counts rows, right rows and right chains per draft position, without waiting for the device.

    Args:
        num_positions: the deepest position, counted from 1.
        device: where the rows will be.
    """

    def __init__(self, num_positions: int, device: torch.device | str = "cpu") -> None:
        self.num_positions = num_positions
        # Rows of the table: seen, right, right with everything before it.
        self.counts = torch.zeros(3, num_positions, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(
        self,
        logits: torch.Tensor,
        labels: torch.LongTensor,
        positions: torch.LongTensor,
        blocks: torch.LongTensor,
        num_blocks: int,
    ) -> None:
        """Count the rows of a batch: `logits (rows, vocab)`, the others `(rows,)`; see `SupervisedRows`."""
        is_right = logits.argmax(dim=-1) == labels
        chain = chain_is_right(is_right, blocks, positions, num_blocks, self.num_positions)
        tallies = torch.stack([torch.ones_like(is_right), is_right, chain]).to(self.counts.dtype)
        self.counts.index_add_(1, positions - 1, tallies)

    def take(self) -> torch.Tensor:
        """The counts `(3, positions)`; counting starts anew."""
        counts, self.counts = self.counts, torch.zeros_like(self.counts)
        return counts


def summary(counts: torch.Tensor) -> dict[str, float]:
    """`accuracy_k` for each position that was seen, and `expected_tau`; empty if none was.

    `expected_tau` is 1 + the mean number of drafted tokens before the first wrong one, after true text: the bonus token
    counts, and so does how errors cluster.

    Args:
        counts: `(3, positions)`, of [`DraftMetrics`], summed over processes.
    """
    seen, right, chains = counts.tolist()
    positions = [k for k, count in enumerate(seen) if count]
    if not positions:
        return {}
    accuracies = {f"accuracy_{k + 1}": round(right[k] / seen[k], 4) for k in positions}
    return {**accuracies, "expected_tau": round(1 + sum(chains[k] / seen[k] for k in positions), 3)}
