"""Which way to multiply by a weight is faster on this machine, found out while it is used.

Whether a packed layout pays, and which, depends on the processor, the dtype, the weight's shape, and how many tokens come at
once: some libraries are at the memory's speed with one token, and not with eight; others the other way round.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch

from .packed_layouts import PANELS, WeightLayout, layouts_for

# How often each way is timed before one is chosen. 0: packed always.
NUM_TRIALS = 12
# Packed weights take memory, and time to make; and by less than this two equal ways may seem to differ.
LEAST_GAIN = 0.1
# After each so many products one may pack its weight for the trial: a short call is not to pay for those of long ones.
PRODUCTS_PER_COPY = 12
# More tokens than that count in powers of two.
COUNTED_ONE_BY_ONE = 4
# The tokens of a round, about: so few that a core waits for the memory.
FEW_TOKENS = 16
# Layouts are compared by products with the first rows of a matrix, of at most so many elements.
COMPARED_ELEMENTS = 1 << 22


class Trial:
    """Products of one kind, in both ways by turns, until it is known which is faster.

    Attributes:
        packs: whether packed weights are; `None` until it is known.
    """

    def __init__(self) -> None:
        self.packs = None if NUM_TRIALS else True
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.num_packed = 0

    def product(
        self, usual: Callable[[], torch.Tensor], packed: Callable[[], torch.Tensor], is_packed: bool
    ) -> torch.Tensor:
        """The product in one of the ways.

        Args:
            usual, packed: make it.
            is_packed: whether the weight is packed already. What packs it first says nothing about later products.
        """
        packs = self._packs_now(is_packed)
        started = time.perf_counter()
        product = packed() if packs else usual()
        if packs and not is_packed:
            self.num_packed += 1
        else:
            self._note(packs, time.perf_counter() - started)
        return product

    def _packs_now(self, is_packed: bool) -> bool:
        num_usual, num_packed = len(self.seconds[False]), len(self.seconds[True])
        return num_packed < num_usual if is_packed else (self.num_packed + 1) * PRODUCTS_PER_COPY <= num_usual

    def _note(self, packs: bool, seconds: float) -> None:
        self.seconds[packs].append(seconds)
        if min(map(len, self.seconds.values())) >= NUM_TRIALS:
            usual, packed = (median(self.seconds[way]) for way in (False, True))
            self.packs = packed < (1 - LEAST_GAIN) * usual


# By the kind of weight, and then by how many tokens come at once and how many threads there are.
_trials: dict[tuple, dict[tuple[int, int], Trial]] = {}


def trial_of(weight: torch.Tensor, transposed: bool, num_tokens: int) -> Trial:
    """The trial of products of so many tokens with weights like this one."""
    if num_tokens > COUNTED_ONE_BY_ONE:
        num_tokens = 1 << (num_tokens - 1).bit_length()
    trials, kind = _trials_of(weight, transposed), (num_tokens, torch.get_num_threads())
    return trials.get(kind) or trials.setdefault(kind, Trial())


def is_never_faster(weight: torch.Tensor, transposed: bool) -> bool:
    """Whether all trials with weights like this one are over, and none was for packing."""
    trials = _trials_of(weight, transposed).copy().values()
    return bool(trials) and all(trial.packs is False for trial in trials)


def _trials_of(weight: torch.Tensor, transposed: bool) -> dict[tuple[int, int], Trial]:
    return _trials.setdefault((weight.shape, weight.dtype, transposed), {})


# By the kind of matrix, how many tokens come at once, and how many threads there are.
_faster_layouts: dict[tuple, WeightLayout] = {}
# What a thread packs weights for.
_expected = threading.local()


@contextmanager
def products_of(num_tokens: int) -> Iterator[None]:
    """While it is entered, what this thread packs is packed for so many tokens at once, rather than for a round's few."""
    usual = _num_expected()
    _expected.num_tokens = num_tokens
    try:
        yield
    finally:
        _expected.num_tokens = usual


def _num_expected() -> int:
    return getattr(_expected, "num_tokens", FEW_TOKENS)


def faster_layout(matrix: torch.Tensor) -> WeightLayout:
    """The layout that is multiplied by faster, of a matrix `(out, in)` like this one.

    Few tokens are multiplied by panels, where they can be had: what libraries lose is waiting for the memory, and trials with a
    matrix that lies in the processor's caches don't show it. Otherwise it is found out when the first is packed.
    """
    num_tokens, layouts = _num_expected(), layouts_for(matrix.dtype)
    if num_tokens <= FEW_TOKENS and PANELS in layouts:
        return PANELS
    kind = matrix.shape, matrix.dtype, num_tokens, torch.get_num_threads()
    if kind not in _faster_layouts:
        is_tried = NUM_TRIALS and len(layouts) > 1
        _faster_layouts[kind] = _fastest(layouts, matrix, num_tokens) if is_tried else layouts[0]
    return _faster_layouts[kind]


@torch.no_grad()
def _fastest(layouts: Sequence[WeightLayout], matrix: torch.Tensor, num_tokens: int) -> WeightLayout:
    """Of some layouts the one whose products of so many tokens take least time; all take turns."""
    rows = matrix[: max(COMPARED_ELEMENTS // matrix.shape[1], 1)]
    tokens = rows.new_ones(num_tokens, rows.shape[1])
    packed = {layout: layout.pack(rows) for layout in layouts}
    seconds: dict[WeightLayout, list[float]] = {layout: [] for layout in layouts}
    for _ in range(NUM_TRIALS):
        for layout in layouts:
            started = time.perf_counter()
            layout.multiply(tokens, packed[layout], rows, None)
            seconds[layout].append(time.perf_counter() - started)
    return min(layouts, key=lambda layout: median(seconds[layout]))
