"""Does a checkpoint hold the weights of this model? Names, shapes and dtypes are compared before anything is loaded."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from .tensor_files import TensorFacts

# How many wrong weights a message names before it counts the rest.
NAMED = 8


def expected_weights(build: Callable[[], PreTrainedModel]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """What a checkpoint of the model that `build` makes has to hold, without making it.

    Returns:
        Its state dict on the meta device, and the names that may be missing (tied to others, or with a default).
    """
    with torch.device("meta"):
        model = build()
    expected = model.state_dict()
    patterns = model._keys_to_ignore_on_load_missing or ()
    optional = {name for name in expected if any(re.search(pattern, name) for pattern in patterns)}
    return expected, optional | model.all_tied_weights_keys.keys()


def account_for_weights(
    found: dict[str, TensorFacts],
    expected: dict[str, torch.Tensor],
    optional: Iterable[str] = (),
    renamed: dict[str, str] | None = None,
    ignored: Iterable[str] = (),
) -> dict[str, str]:
    """Match the tensors of a checkpoint with those that a model needs.

    Args:
        found: what the files hold.
        expected: what the model needs, by its own names.
        optional: names of it that may be missing.
        renamed: patterns of names in the files, and what takes their place.
        ignored: patterns of names that a layout may carry and the model does not read.

    Returns:
        For each weight that is read its name in the files, by its name in the model.

    Raises:
        ValueError: if a weight is missing or left over, or has another shape or kind of numbers; the message names it.
    """
    problems, sources = [], {}
    left_over = []
    for name, facts in found.items():
        own = own_name(name, renamed or {})
        if own not in expected:
            if not any(re.search(pattern, own) for pattern in ignored):
                left_over.append(name)
            continue
        if own in sources:
            problems.append(f"{name} and {sources[own]} are the same weight")
        sources[own] = name
        problems += mismatches(name, facts, expected[own])
    missing = expected.keys() - sources.keys() - set(optional)
    keys = {"missing keys": missing, "unexpected keys": left_over}
    problems = [f"{kind}: {listed(names)}" for kind, names in keys.items() if names] + problems
    if problems:
        raise ValueError(
            "; ".join([*problems[:NAMED], *([f"and {len(problems) - NAMED} more"] if problems[NAMED:] else [])])
        )
    return sources


def own_name(name: str, renamed: dict[str, str]) -> str:
    """What a weight of a file is called in the model; `renamed` as for [`account_for_weights`]."""
    for pattern, replacement in renamed.items():
        name = re.sub(pattern, replacement, name)
    return name


def mismatches(name: str, facts: TensorFacts, expected: torch.Tensor) -> list[str]:
    """What is wrong with a tensor in a file, against what a model needs there; empty if nothing is."""
    if facts.shape != tuple(expected.shape):
        return [f"{name} has shape {facts.shape}, and config.json asks for {tuple(expected.shape)}"]
    if expected.is_floating_point() and not facts.is_floating_point:
        return [f"{name} has dtype {facts.dtype}, expected floating-point numbers of 16 bits or more"]
    if not expected.is_floating_point() and facts.is_floating_point:
        return [f"{name} has dtype {facts.dtype}, expected {str(expected.dtype).removeprefix('torch.')}"]
    return []


def listed(names: Iterable[str]) -> str:
    """Names in order, as many as a message should have."""
    names = sorted(names)
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if names[NAMED:] else "")


def all_finite(weight: torch.Tensor) -> bool:
    """Whether a tensor holds no infinity and no NaN."""
    # One of them makes the sum one, and a sum takes a fraction of the time. It may also be too large for the dtype.
    precision = torch.promote_types(weight.dtype, torch.float32)
    return bool(torch.isfinite(weight.sum(dtype=precision))) or bool(torch.isfinite(weight).all())


def check_finite(model: PreTrainedModel, source: Any) -> None:
    """Raise a `ValueError` if a loaded weight holds an infinity or NaN, which no trained drafter does."""
    wrong = [
        name
        for name, weight in model.state_dict().items()
        # Quantised weights are of classes of their own, which need not know a sum.
        if type(weight) is torch.Tensor and weight.is_floating_point() and not weight.is_meta and not all_finite(weight)
    ]
    if wrong:
        raise ValueError(
            f"the weights in {source} hold infinities or NaN ({listed(wrong)}): the file is damaged, or training diverged. Get "
            "the checkpoint again"
        )
