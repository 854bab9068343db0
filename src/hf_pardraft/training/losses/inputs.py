"""What the objectives take, checked, and rid of what doesn't count. Pure."""

import torch

# The label of a token that is not learned, as everywhere in transformers.
IGNORED = -100


def checked_blocks(
    draft_logits: torch.Tensor, valid: torch.BoolTensor, labels: torch.LongTensor | None = None, **others: torch.Tensor
) -> tuple[torch.Tensor, torch.BoolTensor]:
    """The logits, 0 at the positions that don't count, and which do count: those that are valid and have a label.

    What stands elsewhere may be anything, NaN too, as attention gives where a row sees nothing: a gradient of 0 times NaN
    would be NaN.

    Args:
        draft_logits: `(blocks, positions, vocab)`.
        valid: `(blocks, positions)`.
        labels: `(blocks, positions)`, -100 where there is none.
        others: what has the shape of the logits, or of `valid`.

    Raises:
        ValueError: unless the shapes agree.
    """
    named = others if labels is None else {"labels": labels, **others}
    shapes = {"valid": valid.shape, **{name: tensor.shape for name, tensor in named.items()}}
    expected = {name: draft_logits.shape[: len(shape)] for name, shape in shapes.items()}
    if draft_logits.ndim != 3 or shapes != expected or valid.ndim != 2:
        found = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(
            "expected draft_logits (blocks, positions, vocab), and labels and valid (blocks, positions), got "
            f"{tuple(draft_logits.shape)} and {found}"
        )
    valid = valid.bool() if labels is None else valid.bool() & (labels != IGNORED)
    return draft_logits.masked_fill(~valid[:, :, None], 0), valid
