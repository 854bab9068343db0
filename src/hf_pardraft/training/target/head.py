"""The target's logits of a few tokens at a time, from hidden states that it gave for all."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput


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

    # A compiled drafter asks it in the middle of its forward, and nothing can be compiled of a forward that is replaced.
    @torch.compiler.disable
    @torch.no_grad()
    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """`(positions, vocab)`, from last hidden states `(positions, hidden)`."""
        target, base = self._target(), self._base()
        output = self.output_class(last_hidden_state=states[None])
        own = vars(base).get("forward")
        base.forward = lambda *args, **kwargs: output
        try:
            # Only the shape of the ids could be looked at.
            ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
            return target(input_ids=ids, use_cache=False, logits_to_keep=0, return_dict=True).logits[0]
        finally:
            if own is None:
                del base.forward
            else:
                base.forward = own


_heads: "weakref.WeakKeyDictionary[PreTrainedModel, TargetHead]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def target_head(target: PreTrainedModel) -> TargetHead:
    """The head of a target that has not been seen at work: a forward of one token, once, shows its base model.

    Raises:
        ValueError: if it is not divided into a base model and a head.
    """
    if target not in _heads:
        ids = torch.zeros(1, 1, dtype=torch.long, device=target.get_input_embeddings().weight.device)
        with watching_base(target) as seen:
            target(input_ids=ids, use_cache=False, return_dict=True)
        if seen.module is None:
            raise ValueError(f"{type(target).__name__} has no base model whose states its head could be given")
        _heads[target] = TargetHead(target, seen)
    return _heads[target]
