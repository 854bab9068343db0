"""What of a drafter's folder would be uploaded, and what stands against it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers.dynamic_module_utils import get_relative_import_files

from ..checkpoints.atomic_folders import CARD
from ..checkpoints.files import check_beside
from ..checkpoints.locks import LOCK
from ..user_input.files import read_json
from .cards import REPOSITORY, card_gaps, has_measured_numbers

# What lies beside a drafter and is no part of it.
LEFT_OUT_FOLDERS = {
    "checkpoint-*": "a checkpoint of training",
    "runs": "logs of training",
    "__pycache__": "compiled code",
}
LEFT_OUT_FILES = {
    "train_settings.yaml": "settings of training, which name local folders",
    "trainer_state.json": "a log of training, which names local folders",
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
PICKLED_WEIGHTS = ("pytorch_model*.bin", "warp_model.bin")


@dataclass(frozen=True)
class Upload:
    """What a folder would become on the Hub.

    Attributes:
        folder: on this machine.
        files: what would be uploaded, and how many bytes each has, by path in the repository.
        left_out: what lies in the folder and would not be, and why.
        gaps: what the model card does not say, and other things that a reader would miss.
        is_measured: whether the card has measured numbers.
    """

    folder: Path
    files: dict[str, int]
    left_out: dict[str, str]
    gaps: list[str]
    is_measured: bool

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


def plan_upload(folder: Path, load: Callable[[Path], Any]) -> Upload:
    """Look at a folder and load the drafter in it; nothing leaves this machine.

    Args:
        folder: what `save_pretrained` wrote.
        load: loads a drafter without any code from the folder, and raises if that can't be done.

    Raises:
        FileNotFoundError: if the folder holds no drafter.
        ValueError: if its weights are pickled, its code is incomplete, a link leads out of it, or it does not load.
    """
    check_holds_drafter(folder)
    pickled = sorted(path.name for pattern in PICKLED_WEIGHTS for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} has pickled weights ({', '.join(pickled)}), which can run code where they are loaded and are not "
            "published: write safetensors with AutoDrafter.from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
    # Before anything is read that a link may show.
    files, left_out = folder_contents(folder)
    check_code(folder)
    ngram = load(folder).generation_config.to_dict().get("ngram_model")
    card = read_card(folder)
    gaps = ["no model card (README.md): pardraft card FOLDER"] if card is None else card_gaps(card)
    if not saved_auto_map(folder):
        gaps.append(
            "no code: it loads only where hf_pardraft is installed; AutoDrafter.from_pretrained(FOLDER).save_pretrained(FOLDER) "
            "writes it"
        )
    if ngram is not None and (Path(ngram).exists() or not REPOSITORY.fullmatch(ngram)):
        gaps.append(
            f"the n-gram model {ngram}, without which it drafts nowhere else: publish that (NgramModel.push_to_hub) and name its "
            "repository in generation_config.ngram_model, or leave the setting out"
        )
    return Upload(folder, files, left_out, gaps, card is not None and has_measured_numbers(card))


def check_holds_drafter(folder: Path) -> None:
    """Raise a `FileNotFoundError` for a folder without a configuration."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no drafter: expected a folder with config.json, as save_pretrained writes it"
        )


def folder_contents(folder: Path, root: Path | None = None) -> tuple[dict[str, int], dict[str, str]]:
    """The files to upload with their sizes, and what is left out with the reason; by path below `folder`, sorted.

    Args:
        folder: where to look.
        root: of what is uploaded, if that is not `folder` itself.

    Raises:
        ValueError: if there is a link to something outside of `root`, or to a folder: what it shows is not the drafter's.
    """
    files, left_out = {}, {}
    for path in sorted(folder.iterdir()):
        reason = reason_to_leave_out(path)
        if reason:
            left_out[path.name] = reason
            continue
        check_link(path, root or folder)
        if path.is_dir():
            below, below_out = folder_contents(path, root or folder)
            files |= {f"{path.name}/{name}": size for name, size in below.items()}
            left_out |= {f"{path.name}/{name}": why for name, why in below_out.items()}
        else:
            files[path.name] = path.stat().st_size
    return files, left_out


def check_link(path: Path, root: Path) -> None:
    """Raise a `ValueError` if a path is a link to a folder, or to a file that is not in `root` (or in the Hub's own cache)."""
    if path.is_symlink() and path.is_dir():
        raise ValueError(
            f"{path} is a link to the folder {path.resolve()}, and no link to a folder is followed: remove it, or copy what "
            "you mean to publish"
        )
    check_beside(str(path), root)


def reason_to_leave_out(path: Path) -> str | None:
    """Why a file or folder is not published; `None` if it is."""
    if path.name.startswith("."):
        return "hidden"
    if path.name == LOCK:
        return "of whoever writes the folder now"
    if path.is_dir():
        return next((why for pattern, why in LEFT_OUT_FOLDERS.items() if path.match(pattern)), None)
    if any(path.match(pattern) for pattern in PICKLES):
        return "a pickle, which can run code where it is loaded"
    return LEFT_OUT_FILES.get(path.name) if path.is_file() else "no file"


def saved_auto_map(folder: Path) -> dict[str, str]:
    config = read_json(folder / "config.json")
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    return auto_map if isinstance(auto_map, dict) else {}


def check_code(folder: Path) -> None:
    """Raise a `ValueError` if a file of code is missing that config.json, or another one, refers to."""
    modules = {str(path).rsplit(".", 1)[0] for path in saved_auto_map(folder).values() if "--" not in str(path)}
    for module in sorted(modules):
        try:
            for needed in (folder / f"{module}.py", *get_relative_import_files(folder / f"{module}.py")):
                Path(needed).read_bytes()
        except FileNotFoundError as error:
            raise ValueError(
                f"the code in {folder} is incomplete: {Path(error.filename).name} is missing, so that it can't be loaded with "
                "trust_remote_code=True. Save it again: AutoDrafter.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            ) from error


def read_card(folder: Path) -> ModelCard | None:
    """The folder's model card, or `None`.

    Raises:
        ValueError: if its metadata can't be read.
    """
    if not (folder / CARD).is_file():
        return None
    try:
        return ModelCard.load(folder / CARD)
    except Exception as error:
        raise ValueError(f"the metadata of {folder / CARD} can't be read ({error}): mend its YAML block") from error


def check_publishable(upload: Upload, allow_unmeasured: bool) -> None:
    """Raise a `ValueError` for a card without measured numbers, unless that is allowed."""
    if not upload.is_measured and not allow_unmeasured:
        raise ValueError(
            f"the card of {upload.folder} has no measured numbers, and a drafter is worth what it measures: run pardraft eval "
            "and pardraft card FOLDER --results FILE, or pass --allow-unmeasured"
        )
