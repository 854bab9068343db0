"""One-token steps of plain `generate` on a CPU, compiled once so much is written that it pays."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, CompileConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from ..generation.compiled.compiler import Compiler
from ..generation.packing.packed_layers import have_replaced_forwards
from ..generation.probing import COARSE_TOLERANCE, TOLERANCES
from ..generation.shared_keys import shared_keys
from ..generation.structure import modules_of
from ..models.masks import additive
from .fast_steps import FastSteps
from .joined_cache import SEE_ALL, JoinedCache

logger = logging.get_logger(__name__)

# Compiling takes a minute or two, of a target of 30 layers, and saves a fifth or a fourth of what comes after it.
SECONDS_BEFORE = 300.0
# For a single item all would be compiled anew.
FEWEST_ITEMS = 2
# What a forward may be told besides tokens, their positions, the mask and the cache.
SAYS_NOTHING = {"use_cache": (True, None), "return_dict": (True, None), "logits_to_keep": (0, 1, None)}


class OpenedLayer(CacheLayerMixin):
    """Keys and values of one layer, `(items, heads, columns, head_dim)`, of which the last column is written next."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2] - 1

    def get_max_length(self) -> int:
        return self.keys.shape[2]


def step(
    model: PreTrainedModel,
    ids: torch.LongTensor,
    positions: torch.LongTensor,
    real: torch.BoolTensor,
    layers: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """A forward over one token of each item.

    Args:
        model: the target.
        ids, positions: `(items, 1)`.
        real: `(items, columns)`, which columns are no padding, those of the tokens included.
        layers: keys and values, see [`OpenedLayer`]; changed in place.

    Returns:
        Logits `(items, 1, vocab)`.
    """
    with FastSteps():
        cache = Cache(layers=[OpenedLayer(keys, values) for keys, values in layers])
        mask = additive(real[:, None], model.dtype)
        outputs = type(model).forward(
            model,
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
    return outputs.logits


class CompiledSteps:
    """The steps of a target's texts.

    Args:
        target: the model.
        packs: whether compiled steps multiply by packed weights.

    Attributes:
        seconds: how long uncompiled steps took so far.
        num_steps: how many compiled ones there were.
    """

    def __init__(self, target: PreTrainedModel, packs: bool) -> None:
        self.target, self.packs = target, packs
        self.seconds, self.num_steps = 0.0, 0
        self.may_compile = can_compile(target)
        self._compiler: Compiler | None = None

    def are_compiled(self, num_items: int) -> bool:
        """Whether the coming steps of a batch are."""
        return self.may_compile and self.seconds >= SECONDS_BEFORE and num_items >= FEWEST_ITEMS

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Steps that are not compiled."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Until it is left, the target's forwards over one token of a [`JoinedCache`] are compiled."""
        usual = self.target.forward

        @functools.wraps(usual)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if args or not self._is_step(kwargs):
                return usual(*args, **kwargs)
            return self._step(usual, kwargs)

        self.target.forward = forward
        try:
            with shared_keys(self.target.device):
                yield
        finally:
            del self.target.forward
            if self._compiler is not None:
                # What it keeps of each step's shapes.
                self._compiler.check_again()

    def _is_step(self, kwargs: dict[str, Any]) -> bool:
        rest = {*kwargs} - {"input_ids", "position_ids", "attention_mask", "past_key_values"}
        return (
            self.may_compile
            and isinstance(kwargs.get("past_key_values"), JoinedCache)
            and kwargs["input_ids"].shape[1] == 1
            and kwargs["position_ids"].ndim == kwargs["attention_mask"].ndim == 2
            and all(kwargs[name] in SAYS_NOTHING.get(name, (None, False)) for name in rest)
        )

    def _step(self, usual: Callable, kwargs: dict[str, Any]) -> CausalLMOutputWithPast:
        cache = kwargs["past_key_values"]
        is_first = self._compiler is None
        if is_first:
            self._compiler = Compiler(self.target, CompileConfig(dynamic=True), self.packs)
            expected = usual(**kwargs).logits
            cache.crop(-1)
        ids, positions = kwargs["input_ids"].contiguous(), kwargs["position_ids"].contiguous()
        logits = self._compiler(
            step, None, self.target, ids, positions, kwargs["attention_mask"].bool(), cache.opened()
        )
        if is_first and not (self._compiler.has_compiled(step, None) and is_close(logits, expected)):
            logger.warning_once(
                "The target's steps are not compiled: they would not be the same, or can't be compiled."
            )
            self.may_compile, logits = False, expected
        self.num_steps += self.may_compile
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def can_compile(target: PreTrainedModel) -> bool:
    """Whether it is a model on a CPU that sees all of its text in each layer, and whose forwards are its own."""
    layer_types, _ = get_layer_types_and_kwargs(target.config)
    return (
        target.device.type == "cpu" and set(layer_types) <= SEE_ALL and not have_replaced_forwards(modules_of(target))
    )


def is_close(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two forwards are the same to rounding."""
    error = (logits - expected).norm() / expected.norm()
    return error.item() <= TOLERANCES.get(logits.dtype, COARSE_TOLERANCE)
