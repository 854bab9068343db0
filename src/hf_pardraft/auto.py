"""AutoDrafter: reads a config.json of any known layout and loads the drafter that it describes."""

from typing import Any

from transformers import AutoModel, PreTrainedConfig

from .hub.recognise import drafter_class_for, find_drafter_class
from .models.checked_loading import hub_arguments, with_resolved_revision
from .models.checkpoint_files import read_config_file
from .models.config_checks import check_config_fields
from .models.drafting import ParallelDrafter
from .models.target_projection import with_subfolder

__all__ = ["AutoDrafter", "drafter_class_for"]


class AutoDrafter:
    """Loads whichever drafter a folder or Hub repository holds; not to be instantiated."""

    def __init__(self) -> None:
        raise OSError("AutoDrafter is used through AutoDrafter.from_pretrained(name_or_path)")

    @classmethod
    def from_pretrained(cls, name_or_path, **kwargs: Any) -> ParallelDrafter:
        """Load a drafter of any known layout. Code that came with it is not run, whatever its config says.

        A drafter of an unknown layout that brings its own code is loaded with that code, if `trust_remote_code=True`.

        Args:
            name_or_path: a folder, or a repository on the Hub.
            **kwargs: as for `PreTrainedModel.from_pretrained` (`dtype`, `device_map`, `revision`, `token`, ...).

        Raises:
            OSError: if it is not there, or can't be reached (offline, gated, ...).
            ValueError: if the layout is not known, a file is damaged, or a weight is missing or left over.
        """
        trust_remote_code = kwargs.pop("trust_remote_code", False)
        kwargs = with_subfolder(name_or_path, with_resolved_revision(name_or_path, kwargs))
        config = kwargs.get("config")
        if isinstance(config, PreTrainedConfig):
            fields = config.to_dict()
        else:
            fields = read_config_file(config or name_or_path, **hub_arguments(kwargs))
        source = f"the config of {name_or_path}"
        check_config_fields(fields, source)
        if trust_remote_code and find_drafter_class(fields) is None and "AutoModel" in (fields.get("auto_map") or {}):
            return load_with_its_own_code(name_or_path, **kwargs)
        return drafter_class_for(fields, source).from_pretrained(name_or_path, **kwargs)


def load_with_its_own_code(name_or_path, **kwargs: Any) -> ParallelDrafter:
    """Load a drafter with the code that came with it, which the user trusts.

    Raises:
        ValueError: if what it loads is no drafter.
    """
    model = AutoModel.from_pretrained(name_or_path, trust_remote_code=True, **kwargs)
    # A class loaded from a repository is not the class that we import.
    missing = [name for name in ("draft", "new_draft_state", "check_target") if not hasattr(model, name)]
    if missing:
        raise ValueError(
            f"{name_or_path} holds a {type(model).__name__}, which is no parallel drafter (it has no {', '.join(missing)}): load "
            "it with transformers' own classes"
        )
    return model
