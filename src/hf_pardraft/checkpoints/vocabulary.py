"""The file in which a drafter keeps its draft vocabulary beside weights that stay as they are: written, and looked at before it
is used."""

from pathlib import Path

import torch

from ..models.base import ParallelDrafter
from ..models.modeling_dart import check_vocabulary_maps
from ..models.modeling_pard import VOCABULARY_FILE, VOCABULARY_MAPS, save_tensors
from .tensor_files import check_tensors, read_tensors


def save_vocabulary(drafter: ParallelDrafter, folder: str | Path) -> None:
    """Write the file into a folder."""
    save_tensors({name: drafter.get_buffer(name) for name in VOCABULARY_MAPS}, folder, VOCABULARY_FILE)


def vocabulary_in(path: str, vocab_size: int, size: int | None = None) -> torch.LongTensor:
    """The target's ids of the tokens that a file of `d2t` and `t2d` names, `(tokens,)`, ascending.

    Args:
        path: of a safetensors file.
        vocab_size: of the target.
        size: how many tokens config.json says there are; `None` if it does not.

    Raises:
        ValueError: if the file is damaged, its tensors are of another shape or dtype, or name different tokens.
    """
    facts = check_tensors(path)
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in facts.items()}
    shape = found["d2t"][0] if size is None and "d2t" in found else (size,)
    # As safetensors calls them: int64 and bool.
    expected = {"d2t": (shape, "I64"), "t2d": ((vocab_size,), "BOOL")}
    if found != expected or len(shape) != 1:
        raise ValueError(
            f"the draft vocabulary in {path} does not fit config.json: expected {expected} (draft_vocab_size and vocab_size), "
            f"found {found}: get it again"
        )
    maps = read_tensors(facts)
    check_vocabulary_maps(maps["d2t"], maps["t2d"], f" in {path}")
    return maps["t2d"].nonzero().flatten()


def check_vocabulary_is_named(drafter: ParallelDrafter) -> None:
    """Raise a `ValueError` if a drafter's config says how many tokens it proposes, and nothing says which."""
    # Code that a drafter brought along may be of a time before there were such.
    size = getattr(drafter.config, "draft_vocab_size", None)
    if size is not None and size < drafter.config.vocab_size and drafter.draft_token_ids is None:
        raise ValueError(
            f"the config of this {type(drafter).__name__} says that it proposes {size} tokens (draft_vocab_size), and none are "
            "named, as if its weights were put into a new one: call drafter.set_draft_vocabulary with their ids, or with None to "
            "propose all"
        )
