"""Weights of linear layers in a layout in which a CPU reads a few tokens in little more time than one.

A packed copy belongs to a parameter, whoever multiplies by it: all compiled shapes, the target's head and a drafter that borrows
it. It is made when it is first needed, made again when the parameter has changed, and goes when the parameter goes. Where it
isn't faster (see `packing_trials.py`), it is not used.
"""

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..one_off import made_once
from .packed_layouts import WeightLayout, layouts_for
from .packing_trials import faster_layout, is_never_faster, trial_of
from .panels import sum_rows

# Below that many elements a weight is in the processor's caches, and to ask for its copy costs more than that saves.
FEWEST_ELEMENTS = 1 << 16
# Rows are compared in such parts.
WORD_BYTES = 8

_library = torch.library.Library("hf_pardraft", "DEF")
_library.define("linear(Tensor input, Tensor weight, Tensor? bias, bool transposed) -> Tensor")


@dataclass(frozen=True)
class PackedWeight:
    """What was packed of a parameter.

    Attributes:
        layout: in which it is.
        weight: as the layout's library packed it.
        state: of the parameter then, see [`_state`].
        fingerprint: of the parameter then, see [`_fingerprint`].
        parameter: forgets this copy when it goes.
    """

    layout: WeightLayout
    weight: torch.Tensor
    state: tuple
    fingerprint: torch.LongTensor
    parameter: weakref.ref


# By the parameter's id, and whether it was transposed.
_packed: dict[tuple[int, bool], PackedWeight] = {}


def can_pack(weight: torch.Tensor) -> bool:
    """Whether a matrix on a CPU is worth packing, and there is a layout for it on this machine."""
    return (
        weight.ndim == 2
        and weight.device.type == "cpu"
        and weight.numel() >= FEWEST_ELEMENTS
        and weight.shape[1] * weight.element_size() % WORD_BYTES == 0
        and bool(layouts_for(weight.dtype))
    )


def forget_changed(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Drop the packed copies of parameters that have changed since.

    A change that torch counts is seen in every forward. What is written to `parameter.data` is not counted, so that all packed
    parameters are read here, once a call of `generate`.
    """
    for parameter in parameters:
        for key in ((id(parameter), False), (id(parameter), True)):
            known = _packed.get(key)
            is_same = known is None or (
                known.state == _state(parameter) and torch.equal(known.fingerprint, _fingerprint(parameter))
            )
            # A call in another thread may have dropped it meanwhile, and packed the weight anew.
            if not is_same and _packed.get(key) is known:
                _packed.pop(key, None)


def forget(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Drop the packed copies of some parameters."""
    for parameter in parameters:
        for transposed in (False, True):
            _packed.pop((id(parameter), transposed), None)


def forget_slower(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Drop the packed copies of which it was found that they make nothing faster."""
    for parameter in parameters:
        for transposed in (False, True):
            if is_packed(parameter, transposed) and is_never_faster(parameter, transposed):
                _packed.pop((id(parameter), transposed), None)


def has_copies() -> bool:
    """Whether there are any."""
    return bool(_packed)


def is_packed(parameter: torch.nn.Parameter, transposed: bool) -> bool:
    """Whether there is a copy."""
    return (id(parameter), transposed) in _packed


@made_once()
def _pack(parameter: torch.nn.Parameter, transposed: bool) -> PackedWeight:
    matrix = parameter.detach()
    matrix = (matrix.t() if transposed else matrix).contiguous()
    layout, key = faster_layout(matrix), (id(parameter), transposed)
    reference = weakref.ref(parameter, functools.partial(_forget_copy, _packed, key))
    _packed[key] = PackedWeight(layout, layout.pack(matrix), _state(parameter), _fingerprint(parameter), reference)
    return _packed[key]


def _forget_copy(packed: dict, key: tuple[int, bool], gone: weakref.ref) -> None:
    """A parameter is gone. At interpreter exit module globals may be gone already, so everything needed is passed in."""
    packed.pop(key, None)


def _state(parameter: torch.nn.Parameter) -> tuple:
    """What differs when a parameter has other memory, or torch has counted a change."""
    # Inference tensors count none.
    version = None if parameter.is_inference() else parameter._version
    return version, parameter.data_ptr(), parameter.shape, parameter.dtype


def _fingerprint(parameter: torch.nn.Parameter) -> torch.LongTensor:
    """A number for each row, of its bits: a change of 8 bytes or fewer alters it surely, any other with odds of 2^30 to 1."""
    matrix = parameter.detach().contiguous()
    if matrix.storage_offset() * matrix.element_size() % WORD_BYTES:
        # It begins within a word of the memory that it shares with others.
        matrix = matrix.clone()
    words = matrix.view(torch.int64)
    return sum_rows(words, _factors(words.shape[1]))


@functools.lru_cache(maxsize=64)
def _factors(count: int) -> torch.LongTensor:
    """`(count,)` odd numbers, the same ones always, see [`sum_rows`]."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator) * 2 + 1


def multiply(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    """`(..., out)`, from `(..., in)` and a weight of `(out, in)`, or of `(in, out)` if `transposed`, in the faster way."""
    is_known = is_packed(weight, transposed)
    # What is no parameter may be another tensor each time; and a graph may have been kept from a time with other layouts.
    if not (is_known or (isinstance(weight, torch.nn.Parameter) and layouts_for(weight.dtype))):
        return _usual_product(tokens, weight, bias, transposed)
    trial = trial_of(weight, transposed, tokens.numel() // tokens.shape[-1])
    if trial.packs is None:
        arguments = tokens, weight, bias, transposed
        ways = functools.partial(_usual_product, *arguments), functools.partial(packed_product, *arguments)
        return trial.product(*ways, is_known)
    return (packed_product if trial.packs else _usual_product)(tokens, weight, bias, transposed)


def packed_product(
    tokens: torch.Tensor, weight: torch.nn.Parameter, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """[`multiply`], by the packed weight in any case."""
    known = _packed.get((id(weight), transposed))
    if known is None or known.state != _state(weight):
        known = _pack(weight, transposed)
    return known.layout.multiply(tokens, known.weight, weight.t() if transposed else weight, bias)


def _usual_product(
    tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    return functional.linear(tokens, weight.t() if transposed else weight, bias)


_library.impl("linear", multiply, "CPU")


@torch.library.register_fake("hf_pardraft::linear", lib=_library)
def _(tokens, weight, bias, transposed):
    return tokens.new_empty(tokens.shape[0], weight.shape[1 if transposed else 0])


# The same for graphs.
linear = torch.ops.hf_pardraft.linear.default
