"""Where checkpoints keep the projection of a PARD-2 drafter: in a file of its own, or among the other weights."""

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..models.target_projection import PROJECTION, PROJECTION_FILES
from .files import find_separate, find_weight_files
from .tensor_files import check_tensors, describe_tensors, read_tensors
from .weights import all_finite


def find_projection(folder, **source: Any) -> str | None:
    """The file with the projection of a drafter in `folder` (or on the Hub); `None` if there is none.

    Raises:
        ValueError: if it is a link that leads out of the folder.
    """
    return find_separate(folder, PROJECTION_FILES, **source)


def is_among_weights(folder, kwargs: dict[str, Any], has_bias: bool) -> bool:
    """Whether a drafter's own weights include the projection, as in the checkpoints of PARD-2's authors' trainer.

    Args:
        folder: or a repository on the Hub.
        kwargs: of `from_pretrained`.
        has_bias: what its config says.

    Raises:
        OSError: if there are no weights.
        ValueError: if a part of the projection is there.
    """
    weights = kwargs.get("state_dict")
    names = describe_tensors(find_weight_files(folder, kwargs)) if weights is None else weights
    found = {name for name in names if name.startswith(f"{PROJECTION}.")}
    expected = {f"{PROJECTION}.weight", *([f"{PROJECTION}.bias"] if has_bias else [])}
    if found and found != expected:
        raise ValueError(
            f"the projection among the weights of {folder} does not fit config.json (pard2_proj_bias): expected "
            f"{sorted(expected)}, found {sorted(found)}"
        )
    return bool(found)


def without_projection(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` that make a PARD drafter of a PARD-2 configuration."""
    plain = {"spd_type": "pard", "pard2_target_layers": None}
    if not isinstance(kwargs.get("config"), PreTrainedConfig):
        return {**kwargs, **plain}
    config = copy.deepcopy(kwargs["config"])
    config.update(plain)
    return {**kwargs, "config": config}


def load_projection(projection: nn.Linear, path: str) -> None:
    """Copy the weights in `path` into `projection`.

    Raises:
        ValueError: if the file is damaged, or a weight is missing, left over, of another shape or no number.
    """
    facts = check_tensors(path)
    found = {name: tensor.shape for name, tensor in facts.items()}
    expected = {f"{PROJECTION}.{name}": tuple(weight.shape) for name, weight in projection.state_dict().items()}
    if found != expected:
        raise ValueError(
            f"the projection in {path} does not fit config.json: expected {expected} (pard2_target_dim, hidden_size and "
            f"pard2_proj_bias), found {found}"
        )
    if not all(tensor.is_floating_point for tensor in facts.values()):
        raise ValueError(f"the projection in {path} should hold floating-point numbers: get the file again")
    if projection.weight.is_meta:
        return
    weights = read_tensors(facts)
    if not all(map(all_finite, weights.values())):
        raise ValueError(f"the projection in {path} holds infinities or NaN: the file is damaged, get it again")
    projection.load_state_dict({name.removeprefix(f"{PROJECTION}."): weight for name, weight in weights.items()})
