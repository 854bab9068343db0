"""One-token steps of plain `generate` on a CPU, compiled as soon as enough is written for it to pay."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import Cache, CompileConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from ..generation.compiled.compiler import Compiler
from ..generation.compiled.static_cache import StaticKVLayer
from ..generation.packing.fast_attention import fast_attention
from ..generation.packing.packed_layers import fit_in_memory, packable_layers
from ..generation.packing.replaced_forwards import has_replaced_forwards
from ..generation.target_side.probing import FORWARD_ERRORS, TOLERANCES, relative_errors
from ..generation.target_side.servable import check_takes_masks
from ..models.masks import additive
from .fast_steps import FastSteps
from .joined_cache import SEE_ALL, JoinedCache

logger = logging.get_logger(__name__)

# Compiling takes a minute or two, of a target of 30 layers, and saves a fifth or a fourth of what comes after it.
SECONDS_BEFORE = 300.0
# What two forwards in half precision may differ by.
COARSE = 0.05
# For a single item all would be compiled anew.
FEWEST_ITEMS = 2
# What a forward may be told besides tokens, their positions, the mask and the cache.
SAYS_NOTHING = {"use_cache": (True, None), "return_dict": (True, None), "logits_to_keep": (0, 1, None)}


class OpenedLayer(StaticKVLayer):
    """Keys and values of one layer, `(items, heads, columns, head_dim)`, of which the last column is written next."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
        return self.keys, self.values


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
        packs: whether compiled steps multiply by packed weights, if there is memory for the copies.

    Attributes:
        may_compile: whether steps can be compiled, as far as is known.
        seconds: how long was written without, prompts included.
        num_steps: how many compiled ones there were.
    """

    def __init__(self, target: PreTrainedModel, packs: bool) -> None:
        self.target, self.packs = target, packs
        self.seconds, self.num_steps = 0.0, 0
        self.may_compile = True
        self._compiler: Compiler | None = None

    def are_compiled(self, num_items: int) -> bool:
        """Whether the coming steps of a batch are."""
        it_pays = self.seconds >= SECONDS_BEFORE and num_items >= FEWEST_ITEMS
        return it_pays and self.may_compile and can_compile(self.target)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Steps that are not compiled."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Until it is left, the target's forwards, over one token of each item of a [`JoinedCache`], are compiled."""
        usual = self.target.forward
        if self._compiler is None:
            packs = self.packs and fit_in_memory(packable_layers(self.target))
            self._compiler = Compiler(self.target, CompileConfig(dynamic=True), packs)

        @functools.wraps(usual)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.may_compile = self.may_compile and not args and is_step(kwargs)
            return self._step(usual, kwargs) if self.may_compile else usual(*args, **kwargs)

        with fast_attention(self.target), mock.patch.object(self.target, "forward", forward):
            yield
        # What it keeps of each step's shapes.
        self._compiler.check_again()

    def _step(self, usual: Callable, kwargs: dict[str, Any]) -> Any:
        cache, ids = kwargs["past_key_values"], kwargs["input_ids"].contiguous()
        real = kwargs.get("attention_mask")
        # Where nothing is padding, `generate` gives no mask.
        real = ids.new_ones(len(ids), cache.get_seq_length() + 1) if real is None else real
        arguments = self.target, ids, kwargs["position_ids"].contiguous(), real.bool(), cache.opened()
        if not self.num_steps:
            return self._first_step(usual, kwargs, arguments)
        logits = self._compiler(step, None, *arguments)
        self.num_steps += 1
        self.may_compile = self._compiler.has_compiled(step, None)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _first_step(self, usual: Callable, kwargs: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
        """The target's own step, beside which the compiled one is tried."""
        found: list[torch.Tensor] = []
        try:
            found = [self._compiler(step, None, *arguments), *newest(arguments[-1])]
        except FORWARD_ERRORS as error:
            logger.warning_once(f"The target's steps can't be compiled ({type(error).__name__}: {error})")
        kwargs["past_key_values"].crop(-1)
        outputs = usual(**kwargs)
        expected = [outputs.logits, *newest(kwargs["past_key_values"].stored())]
        is_same = bool(found) and are_close(expected, found)
        self.may_compile = is_same and self._compiler.has_compiled(step, None)
        self.num_steps += self.may_compile
        if found and not is_same:
            logger.warning_once("The target's steps are not compiled: they would not be the same")
        return outputs


def newest(layers: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """A copy of the last column of each layer's keys and values."""
    return [entries[:, :, -1].clone() for layer in layers for entries in layer]


def is_step(kwargs: dict[str, Any]) -> bool:
    """Whether a forward is told nothing but tokens, one of each item, their positions, a mask of columns, and the cache."""
    rest = {*kwargs} - {"input_ids", "position_ids", "attention_mask", "past_key_values"}
    ids, positions, mask = (kwargs.get(name) for name in ("input_ids", "position_ids", "attention_mask"))
    return (
        isinstance(kwargs.get("past_key_values"), JoinedCache)
        and ids is not None
        and ids.shape[1] == 1
        and positions is not None
        and positions.ndim == 2
        and (mask is None or mask.ndim == 2)
        and all(kwargs[name] in SAYS_NOTHING.get(name, (None, False)) for name in rest)
    )


def can_compile(target: PreTrainedModel) -> bool:
    """Whether it is a model on a CPU that sees all of its text in each layer, takes masks, and has forwards of its own."""
    layer_types, _ = get_layer_types_and_kwargs(target.config)
    try:
        check_takes_masks(target, {"position_ids": True})
    except ValueError:
        return False
    sees_all = target.device.type == "cpu" and set(layer_types) <= SEE_ALL
    return sees_all and target._can_compile_fullgraph and not has_replaced_forwards(target)


def are_close(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    """Whether results are the same to rounding."""
    return max(relative_errors(expected, found)) <= TOLERANCES.get(expected[0].dtype, COARSE)
