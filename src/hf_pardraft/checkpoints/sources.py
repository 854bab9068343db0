"""Where the files of a drafter come from: one commit of a repository, and of that the folder with the drafter in it."""

from typing import Any

from transformers.utils.hub import resolve_revision

from ..models.base import hub_arguments
from .files import check_place, find_optional

# Arguments of `from_pretrained` that say which commit is meant.
RESOLVING_ARGUMENTS = ("cache_dir", "local_files_only", "token", "revision")
# Where published repositories of PARD-2 keep the drafter.
PUBLISHED_FOLDER = "pard_model"


def located(name_or_path, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` under which all files come from one commit, and the folder in it with the drafter."""
    return with_subfolder(name_or_path, with_resolved_revision(name_or_path, kwargs))


def with_resolved_revision(name_or_path, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` under which all files come from one commit, whatever is pushed meanwhile.

    Raises:
        OSError: if there is no such folder, and no repository could have this name.
    """
    if name_or_path is not None:
        check_place(name_or_path)
    source = {name: value for name, value in hub_arguments(kwargs).items() if name in RESOLVING_ARGUMENTS}
    revision = resolve_revision(name_or_path, **source)
    return kwargs if revision is None else {**kwargs, "revision": revision}


def with_subfolder(folder, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` that lead to the drafter in a published repository, if its root holds none."""
    source = {name: value for name, value in hub_arguments(kwargs).items() if name != "subfolder"}
    if kwargs.get("subfolder"):
        return kwargs
    for subfolder in ("", PUBLISHED_FOLDER):
        source["subfolder"] = subfolder
        if find_optional(folder, "config.json", **source) is not None:
            return {**kwargs, "subfolder": subfolder}
    return kwargs
