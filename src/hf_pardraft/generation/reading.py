"""The target's side of a round: one forward over the unread text and a tree, on a cache that can roll back."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from .cache import TargetCache, check_can_roll_back
from .tree import TokenTree

# What `generate` prepares and this room handles itself; anything else goes to the target's forward as it is.
HANDLED = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
}


@dataclass
class Prompt:
    """The prompt without its padding.

    Attributes:
        ids: `(1, length)`.
        positions: `(1, length)`.
    """

    ids: torch.LongTensor
    positions: torch.LongTensor


def read_prompt(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> Prompt:
    """Drop masked-out columns: no token attends to them, so a single row decodes the same without them."""
    positions = model_kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    if positions.ndim != 2:
        raise ValueError(
            f"this target takes position_ids of {positions.ndim} dimensions; drafting works with (batch, length) only. Call "
            "generate without assistant_model"
        )
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is None:
        return Prompt(input_ids, positions)
    real = attention_mask[0].bool()
    return Prompt(input_ids[:, real], positions[:, real])


def check_request(target: PreTrainedModel, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError`, before any forward, for inputs that drafting can't serve."""
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"drafting decodes one sequence at a time, got a batch of {input_ids.shape[0]}: call generate for each row, or "
            "without assistant_model"
        )
    if not model_kwargs.get("use_cache"):
        raise ValueError("drafting needs the key/value cache: call generate with use_cache=True")
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("drafting needs the prompt as input_ids, got inputs_embeds or an empty prompt: pass token ids")
    check_cache(model_kwargs.get("past_key_values"))
    check_can_roll_back(target.config.get_text_config(decoder=True))
    tensors = sorted(
        name for name, value in model_kwargs.items() if isinstance(value, torch.Tensor) and name not in HANDLED
    )
    if tensors:
        raise ValueError(
            f"drafting works with text alone, got {', '.join(tensors)}: leave them out, or call generate without "
            "assistant_model"
        )


def check_cache(cache: Cache | None) -> None:
    """Raise a `ValueError` unless `cache` is an empty `DynamicCache`, as `generate` makes it."""
    if type(cache) is not DynamicCache or cache.offloading:
        raise ValueError(
            f"drafting keeps its own cache and returns a DynamicCache, got {type(cache).__name__}: leave out "
            "cache_implementation and past_key_values, or pass an empty DynamicCache"
        )
    if cache.get_seq_length() > 0:
        raise ValueError(
            f"past_key_values holds {cache.get_seq_length()} tokens of an earlier call, which a drafter has not seen: leave it "
            "out (the whole text in input_ids is read again), or call generate without assistant_model"
        )


class TargetReader:
    """Runs the target, and keeps its cache at the committed text.

    Args:
        target: the model.
        model_kwargs: as `generate` prepared them.
        requested: keyword arguments for every forward (which hidden states to return, attentions).
    """

    def __init__(self, target: PreTrainedModel, model_kwargs: dict[str, Any], requested: dict[str, Any]) -> None:
        self.target = target
        self.cache = TargetCache()
        self.takes_positions = model_kwargs.get("position_ids") is not None
        self.keeps_logits = target._supports_logits_to_keep()
        extra = {name: value for name, value in model_kwargs.items() if name not in HANDLED and value is not None}
        self.arguments = {**extra, **requested, "use_cache": True, "return_dict": True, "past_key_values": self.cache}

    def read(self, unread: Prompt, tree: TokenTree | None) -> Any:
        """Forward over the unread tokens, whose last is the root, and a chain's nodes behind it.

        Returns:
            The target's outputs; `logits` are `(1, slots, vocab)`, one row for the root and each node.
        """
        ids, positions, num_slots = unread.ids, unread.positions, 1
        if tree is not None:
            ids = torch.cat([ids, tree.tokens], dim=1)
            positions = torch.cat([positions, positions[:, -1:] + tree.depths], dim=1)
            num_slots += tree.num_nodes
        arguments = dict(self.arguments)
        if self.takes_positions:
            arguments["position_ids"] = positions.to(self.target.device)
        if self.keeps_logits:
            arguments["logits_to_keep"] = num_slots
        outputs = self.target(input_ids=ids.to(self.target.device), **arguments)
        outputs.logits = outputs.logits[:, -num_slots:]
        return outputs
