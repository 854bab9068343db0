"""The target's logits of a few tokens at a time, from hidden states that it gave for all."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...models.inputs import input_device
from ...pairing.gathered_rows import gathered_rows, has_plain_rows


@dataclass
class SeenBase:
    """The base model of a causal LM, as seen at work.

    Attributes:
        module: the outermost model inside the causal LM that ran; `None` if none did.
        output: what it returned.
    """

    module: PreTrainedModel | None = None
    output: ModelOutput | None = None


@contextmanager
def watching_base(target: PreTrainedModel) -> Iterator[SeenBase]:
    """See which model inside `target` gives the hidden states that its head gets, and what they are."""
    seen = SeenBase()

    def note(module: nn.Module, _arguments: tuple, output: object) -> None:
        # The outermost returns last.
        if isinstance(output, ModelOutput) and "last_hidden_state" in output:
            seen.module, seen.output = module, output

    inner = [module for module in target.modules() if isinstance(module, PreTrainedModel) and module is not target]
    handles = [module.register_forward_hook(note) for module in inner]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class TargetHead:
    """From the last hidden states of a causal LM to its logits: what it does after its base model, scales and caps included.

    Architectures differ in this (softcapped, multiplied, divided logits), so their own code is run: the causal LM's forward,
    with a base model that returns the given states.

    Args:
        target: the causal LM.
        seen: its base model.
    """

    def __init__(self, target: PreTrainedModel, seen: SeenBase) -> None:
        # Kept beside the target for as long as that lives, and no longer.
        self._target, self._base = weakref.ref(target), weakref.ref(seen.module)
        self.output_class = type(seen.output)
        # Whether each logit depends on its own row of the head alone; known once some tokens were asked for.
        self._by_rows: bool | None = None

    # A compiled drafter asks it in the middle of its forward, and nothing can be compiled of a forward that is replaced.
    @torch.compiler.disable
    @torch.no_grad()
    def __call__(self, states: torch.Tensor, token_ids: torch.LongTensor | None = None) -> torch.Tensor:
        """The logits of last hidden states `(positions, hidden)`.

        Args:
            token_ids: `(columns,)`, the tokens whose logits are wanted; all of them by default. No other row of a plain linear
                head is read.

        Returns:
            `(positions, vocab)`, or `(positions, columns)`.
        """
        head = self._target().get_output_embeddings()
        if token_ids is not None and self._by_rows is None and len(states):
            self._by_rows = self._acts_by_rows(head, states[:1], token_ids)
        if token_ids is not None and self._by_rows and has_plain_rows(head):
            return self._logits_of_rows(head, states, token_ids)
        return chosen_columns(self._logits(states), token_ids)

    def is_of(self, seen: SeenBase) -> bool:
        """Whether it was made of this base model."""
        return self._base() is seen.module

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        target, base = self._target(), self._base()
        output = self.output_class(last_hidden_state=states[None])
        # Only the shape of the ids could be looked at.
        ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        with forward_of(base, lambda *args, **kwargs: output):
            return target(input_ids=ids, use_cache=False, logits_to_keep=0, return_dict=True).logits[0]

    def _logits_of_rows(self, head: nn.Linear, states: torch.Tensor, token_ids: torch.LongTensor) -> torch.Tensor:
        with forward_of(head, gathered_rows(head, token_ids).forward):
            return self._logits(states)

    def _acts_by_rows(self, head: nn.Module | None, states: torch.Tensor, token_ids: torch.LongTensor) -> bool:
        """Whether some rows of the head give these tokens' logits: some architectures add or mix columns afterwards."""
        if head is None or not has_plain_rows(head):
            return False
        wanted = chosen_columns(self._logits(states), token_ids)
        try:
            found = self._logits_of_rows(head, states, token_ids)
        except RuntimeError:
            return False
        return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-2, atol=1e-2)


def chosen_columns(logits: torch.Tensor, token_ids: torch.LongTensor | None) -> torch.Tensor:
    """Of logits, `(positions, vocab)`, those of some tokens, or all of them."""
    return logits if token_ids is None else logits[:, token_ids.to(logits.device)]


@contextmanager
def forward_of(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Let a module compute something else for a while."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


_heads: "weakref.WeakKeyDictionary[PreTrainedModel, TargetHead]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def target_head(target: PreTrainedModel, seen: SeenBase | None = None) -> TargetHead:
    """The head of a target, made once.

    Args:
        target: a causal LM.
        seen: its base model; where it was not seen at work, a forward of one token shows it, once.

    Raises:
        ValueError: if it is not divided into a base model and a head.
    """
    known = _heads.get(target)
    if known is not None and (seen is None or known.is_of(seen)):
        return known
    if seen is None:
        ids = torch.zeros(1, 1, dtype=torch.long, device=input_device(target.get_input_embeddings()))
        with watching_base(target) as seen:
            target(input_ids=ids, use_cache=False, return_dict=True)
    if seen.module is None:
        raise ValueError(f"{type(target).__name__} has no base model whose states its head could be given")
    _heads[target] = TargetHead(target, seen)
    return _heads[target]
