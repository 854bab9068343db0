"""What every result says besides its figures, and how it is stored."""

import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from hf_pardraft.checkpoints.atomic_files import write_whole

RESULTS = Path(__file__).parent / "results"


def this_machine() -> str:
    """A CPU, its threads, and the version of torch."""
    count = torch.get_num_threads()
    return f"{platform.machine()} CPU, {count} thread{'s' if count > 1 else ''}, torch {torch.__version__}"


def public_command() -> str:
    """The command, without the folders of this machine: of paths the last part, of the names of cases all."""
    words = [Path(word).name if is_path(word) else word for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def is_path(word: str) -> bool:
    """Whether a word of a command names a file, or one that may come to be: its folder is there."""
    return "/" in word and (Path(word).is_absolute() or Path(word).parent.exists())


def kept(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier command left in a file of `--work`; `None` if nothing. Of what it does not say it is taken to be alike.

    Exits if it was made with other settings.
    """
    if not path.exists():
        return None
    known = json.loads(path.read_text(encoding="utf-8"))
    others = {name: known[name] for name, value in settings.items() if known.get(name, value) != value}
    if others:
        asked = {name: settings[name] for name in others}
        sys.exit(
            f"error: {path} was made with {others}, not {asked}: give the same settings, or another folder as --work"
        )
    return known


def save(path: Path, result: dict[str, Any], indent: int = 2) -> None:
    """Write a result as JSON, whole or not at all."""
    write_whole(path, json.dumps(result, indent=indent, ensure_ascii=False) + "\n")
