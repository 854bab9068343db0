"""What the files of a checkpoint say of their tensors, looked at before any weight is loaded, and the tensors.

What a file says is not believed: a header may be cut off, a pickle may hold a program.
"""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .checksums import DAMAGED, check_checksums

SAFETENSORS_SUFFIX = ".safetensors"
# safetensors' names of what torch can hold; others (8-bit floats and less) are kept as they are called.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class TensorFacts:
    """What a file says about one tensor: its shape, its dtype as torch calls it, and the file's path."""

    shape: tuple[int, ...]
    dtype: str
    path: str

    @property
    def is_floating_point(self) -> bool:
        return self.dtype in FLOATS.values()


def describe_tensors(paths: Iterable[str]) -> dict[str, TensorFacts]:
    """What the files say about their tensors, by name; no weight is read from safetensors.

    Raises:
        ValueError: if a file is cut off or otherwise no checkpoint, holds a program, or a name comes twice.
    """
    found: dict[str, TensorFacts] = {}
    for path in paths:
        facts = describe_safetensors(path) if is_safetensors(path) else describe_pickle(path)
        twice = sorted(found.keys() & facts.keys())
        if twice:
            raise ValueError(
                f"{path} holds {', '.join(twice[:5])} once more, after another shard: get the checkpoint again"
            )
        found |= facts
    return found


def check_tensors(path: str) -> dict[str, TensorFacts]:
    """What a file with weights holds, its checksums compared if it has any; raises a `ValueError` if it is damaged."""
    facts = describe_tensors([path])
    if is_safetensors(path):
        check_checksums(path)
    return facts


def is_safetensors(path: str) -> bool:
    return Path(path).name.endswith(SAFETENSORS_SUFFIX)


def describe_safetensors(path: str) -> dict[str, TensorFacts]:
    """See [`describe_tensors`]."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorFacts(tuple(part.get_shape()), FLOATS.get(part.get_dtype(), part.get_dtype()), path)
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file and can't be read ({error}): {DAMAGED}") from error


def describe_pickle(path: str) -> dict[str, TensorFacts]:
    """See [`describe_tensors`]."""
    return {
        name: TensorFacts(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), path)
        for name, tensor in read_pickle(path).items()
    }


def read_pickle(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a pickle; anything else in it is refused, and nothing in it is run.

    Raises:
        ValueError: if it is damaged, or holds anything but tensors by name.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors, or is damaged, and was not run (weights_only=True): get the checkpoint as "
            f"safetensors. {str(error).splitlines()[0]}"
        ) from error
    except (RuntimeError, EOFError, KeyError, ValueError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} is not a whole PyTorch file ({error}): {DAMAGED}") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise ValueError(
            f"{path} should hold tensors by name, and holds something else: get the checkpoint as safetensors"
        )
    return dict(found)


def read_tensors(facts: dict[str, TensorFacts]) -> dict[str, torch.Tensor]:
    """The tensors that [`describe_tensors`] found, or some of them, bit by bit as they are in the files."""
    found = {}
    for path in sorted({tensor.path for tensor in facts.values()}):
        names = [name for name, tensor in facts.items() if tensor.path == path]
        if is_safetensors(path):
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in names}
        else:
            pickled = read_pickle(path)
            found |= {name: pickled[name] for name in names}
    return found
