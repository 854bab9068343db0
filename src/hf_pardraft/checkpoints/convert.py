"""Converting a drafter between layouts: there and back is bit-exact, and the destination is written whole or not at all."""

import re
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models.base import ParallelDrafter, hub_arguments
from .atomic_folders import finish_interrupted
from .config_checks import check_config_fields
from .export import check_export, export_drafter
from .files import ADAPTER_FILE, check_beside, find_optional, read_config_file
from .layouts import LAYOUTS, NATIVE, check_layout
from .loading import describe_checkpoint, match_weights
from .projection import find_projection
from .published import drafter_class_for
from .sources import located, with_subfolder
from .staging import LICENCES, TOKENIZER_FILES, check_destination, replaced_checkpoint
from .tensor_files import TensorFacts, describe_tensors, read_tensors


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        kind: of drafter.
        layout: that it is in now.
        num_weights: how many tensors were written.
        unread: weights of the source that the drafter does not read, and why.
        served_by: where a checkpoint in this layout is used.
    """

    kind: str
    layout: str
    num_weights: int
    unread: dict[str, str]
    served_by: str


def load_exactly(source, **kwargs: Any) -> tuple[ParallelDrafter, dict[str, str]]:
    """Load a drafter of any known layout, each weight in the dtype that it has in its file.

    Returns:
        The drafter, and the weights of the files that it does not read, with the reasons.

    Raises:
        OSError, ValueError: see [`AutoDrafter.from_pretrained`].
    """
    finish_interrupted(source)
    kwargs = located(source, kwargs)
    fields = read_config_file(source, **hub_arguments(kwargs))
    check_config_fields(fields, f"the config of {source}")
    drafter = drafter_class_for(fields, f"the config of {source}").from_pretrained(source, **kwargs)
    facts = describe_checkpoint(source, kwargs)
    names = match_weights(type(drafter), drafter.config, facts, source)
    # One dtype was chosen for all when they were loaded, which may have rounded some.
    restore_dtypes(drafter, {own: facts[name] for own, name in names.items()}, names)
    if drafter.config.to_dict().get("pard2_target_layers") is not None:
        projection = find_projection(source, **hub_arguments(kwargs))
        if projection is not None:
            restore_projection(drafter, projection)
    reasons = {
        name: next(why for pattern, why in type(drafter).ignored_weights.items() if re.search(pattern, name))
        for name in sorted(facts.keys() - names.values())
    }
    return drafter, reasons


def restore_dtypes(drafter: ParallelDrafter, facts: dict[str, TensorFacts], names: dict[str, str]) -> None:
    """Read those weights of a drafter again that have another dtype in their files, and keep it.

    Args:
        drafter: changed in place.
        facts: what the files say about its weights, by its own names.
        names: what these are called in the files.
    """
    loaded = drafter.state_dict()
    changed = {
        names[own]: fact for own, fact in facts.items() if str(loaded[own].dtype).removeprefix("torch.") != fact.dtype
    }
    if not changed:
        return
    own_names = {name: own for own, name in names.items()}
    weights = {own_names[name]: weight for name, weight in read_tensors(changed).items()}
    drafter.load_state_dict(weights, strict=False, assign=True)
    drafter.tie_weights()


def restore_projection(drafter: ParallelDrafter, path: str) -> None:
    """The same for the projection of a PARD-2 drafter, which has a file of its own."""
    drafter.load_state_dict(read_tensors(describe_tensors([path])), strict=False, assign=True)


def name_target(drafter: ParallelDrafter, target: str) -> None:
    """Say in a drafter's config what it was made for.

    Raises:
        ValueError: if it serves a family of targets, or its config names another one.
    """
    named = drafter.config.to_dict().get("target_name_or_path")
    if not drafter.reads_target or named not in (None, target):
        raise ValueError(
            f"this {type(drafter).__name__} was made for {named or 'every target with its tokenizer'}, got target {target!r}: "
            "leave it out"
        )
    drafter.config.target_name_or_path = target


def find_companions(source, **hub: Any) -> list[Path]:
    """The files of a source that go with its drafter: tokenizer and licence.

    Raises:
        ValueError: if one is a link that leads out of its folder: what it shows might be published with the copy.
    """
    paths = [find_optional(source, name, **hub) for name in (*LICENCES, *TOKENIZER_FILES)]
    found = [Path(path) for path in paths if path is not None]
    for path in found:
        check_beside(str(path), path.parent)
    return found


def check_is_no_adapter(source, **hub: Any) -> None:
    """Raise a `ValueError` for an adapter, whose weights are no drafter's."""
    if find_optional(source, ADAPTER_FILE, **hub) is not None:
        raise ValueError(
            f"{source} is an adapter, and a conversion copies whole weights: merge it first, "
            f'AutoDrafter.from_pretrained("{source}").save_pretrained("FOLDER"), and convert that folder'
        )


def convert(
    source,
    destination: str | Path,
    layout: str = NATIVE,
    overwrite: bool = False,
    max_shard_size: str = "5GB",
    target: str | None = None,
    reading: AbstractContextManager | None = None,
    **hub: Any,
) -> Conversion:
    """Convert a drafter into another layout.

    Args:
        source: a folder or a repository on the Hub, in any layout that [`AutoDrafter`] reads.
        destination: a folder that is not there yet, or is empty.
        layout: "native", or one of [`LAYOUTS`].
        overwrite: replace a checkpoint in `destination`, and nothing else that is there.
        max_shard_size: a larger checkpoint becomes several files.
        target: the name of its target on the Hub, which a config may not say and some layouts have a place for.
        reading: entered while the source is read, for whoever tells its errors from others.
        **hub: `revision`, `token`, `subfolder`, ..., as for `from_pretrained`.

    Raises:
        OSError: if the source can't be read, or the destination can't be written; it is as it was before.
        ValueError: if the source is damaged, unknown or an adapter, or the layout can't hold its kind.
    """
    check_destination(destination, overwrite)
    check_layout(layout)
    with reading or nullcontext():
        options = hub_arguments(with_subfolder(source, hub))
        check_is_no_adapter(source, **options)
        drafter, unread = load_exactly(source, **hub)
        companions = find_companions(source, **options)
    if target is not None:
        name_target(drafter, target)
    check_export(drafter, layout)
    with replaced_checkpoint(destination, overwrite) as folder:
        export_drafter(drafter, folder, layout, max_shard_size)
        for path in companions:
            # A layout may have brought its own.
            if not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
    served_by = LAYOUTS[layout].served_by if layout in LAYOUTS else "this package, and transformers with its code"
    return Conversion(drafter.config.drafter_kind, layout, len(drafter.state_dict()), unread, served_by)
