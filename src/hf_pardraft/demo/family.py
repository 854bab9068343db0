"""Load a demo family: one tiny target, its tokenizer, and a drafter of each kind."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.published import KIND_NAMES
from ..models.base import ParallelDrafter
from ..user_input.models import load_drafter, load_model, load_tokenizer

SHIPPED_FAMILY = Path(__file__).parent / "family"
# Subfolders of a family, and what people call the drafter in it.
DRAFTER_NAMES = {kind: KIND_NAMES[kind] for kind in ("pard", "dflash", "dflare", "dart")}


@dataclass
class Family:
    """A target and drafters that fit it, `drafters` by display name."""

    tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel
    drafters: dict[str, ParallelDrafter]


def load_family(path: Path) -> Family:
    """Load the family in `path`: the subfolder `target`, and those of [`DRAFTER_NAMES`] that are there.

    The weights are stored in half precision and computed with in float32, where greedy text is reproducible.

    Raises:
        OSError, ValueError: if the target, or every drafter, is missing, or one is damaged.
    """
    folders = {name: path / folder for folder, name in DRAFTER_NAMES.items() if is_model_folder(path / folder)}
    if not is_model_folder(path / "target") or not folders:
        raise FileNotFoundError(
            f"no demo family in {path}: expected the folders target and at least one of {', '.join(DRAFTER_NAMES)}, each "
            f"with a config.json. Train one with: python examples/train_demo.py --output {path}"
        )
    return Family(
        tokenizer=load_tokenizer(str(path / "target")),
        target=load_model(str(path / "target"), dtype=torch.float32),
        drafters={name: load_drafter(str(folder), dtype=torch.float32) for name, folder in folders.items()},
    )


def is_model_folder(path: Path) -> bool:
    return (path / "config.json").is_file()
