"""What a run of `pardraft make` has decided, done and spent, in a file that is whole after a kill: make.json."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoints.atomic_files import check_no_file, write_whole
from ..user_input.files import read_json
from ..user_input.wording import told_differences
from .settings import MakeSettings

FILE = "make.json"
# What a lock or a file manager may leave in a folder that is nobody's.
IGNORED = ("_pardraft.lock", ".DS_Store")


@dataclass
class MakeState:
    """A run's memory.

    Attributes:
        path: of the file.
        settings: that it was begun with.
        dtype: that everything computes in: the machine's best when the run was begun.
        chunks: of text: `upto`, how many dialogues there should be after it, `rows` there are, and the `seconds` it took; the
            last one may be under way (`rows` is `None`).
        decided: numbers that later stages use, by stage.
        seconds: spent, by stage.
        done: stages that are.
    """

    path: Path
    settings: dict[str, Any]
    dtype: str
    chunks: list[dict[str, Any]] = field(default_factory=list)
    decided: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    @property
    def spent(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())

    @property
    def is_writing(self) -> bool:
        """Whether the last chunk of text is under way."""
        return bool(self.chunks) and self.chunks[-1]["rows"] is None

    def save(self) -> None:
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        write_whole(self.path, json.dumps(content, indent=1) + "\n")

    def spend(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.save()

    def finish(self, stage: str) -> None:
        self.done.append(stage)
        self.save()


def check_folder(folder: Path, settings: MakeSettings) -> MakeState | None:
    """The run that a folder holds, `None` for a new one.

    Raises:
        FileExistsError: if it is no folder.
        ValueError: if something else is in it, or a run that was begun with other settings.
    """
    check_no_file(folder)
    path = folder / FILE
    if not path.exists():
        there = sorted(found.name for found in folder.iterdir() if found.name not in IGNORED) if folder.is_dir() else []
        if there:
            raise ValueError(
                f"{folder} is not empty ({', '.join(there[:3])}) and holds no {FILE} of an earlier run: choose a new folder"
            )
        return None
    return read_state(path, settings)


def read_state(path: Path, settings: MakeSettings) -> MakeState:
    """What the file says; a `ValueError` if it is none, or of other settings."""
    content = read_json(path)
    names = set(MakeState.__dataclass_fields__) - {"path"}
    if not isinstance(content, dict) or content.keys() != names:
        raise ValueError(f"{path} is not what pardraft make writes there: choose another --output")
    asked = settings.as_json()
    told = told_differences(content["settings"], asked, asked)
    if told:
        raise ValueError(
            f"{path.parent} was begun with {'; '.join(told)}: use the same settings to go on, or choose another --output"
        )
    return MakeState(path, **content)
