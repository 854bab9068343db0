"""What the target has yet to read: prompts without their padding, and what `generate` prepared to be read beside them."""

from dataclasses import dataclass, field
from typing import Any

import torch

# What `generate` prepares and the loop handles itself; anything else goes to the target's forward as it is.
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
# Where `generate` puts what a target's own encoders made of images, videos and sound.
ENCODED_MEDIA = "mm_encoder_outputs"
# What kind each token is; plain `generate` says of all new ones that they are like the prompt's last.
TOKEN_TYPES = "token_type_ids"


@dataclass
class PendingTokens:
    """What the target has yet to read: the prompt, and later the anchor of each batch item.

    Attributes:
        ids, positions: `(batch, length)`, padded on the left.
        counts: how many are real in each item; `None` if all are.
        num_reread: how many of them, the first ones, the target has read before and then had to forget.
    """

    ids: torch.LongTensor
    positions: torch.LongTensor
    counts: list[int] | None = None
    num_reread: int = 0

    @property
    def anchor_positions(self) -> torch.LongTensor:
        """`(batch, 1)`."""
        return self.positions if self.positions.shape[1] == 1 else self.positions[:, -1:]

    def with_slots(self, slot_depths: torch.LongTensor) -> torch.LongTensor:
        """`positions`, and after them those of a tree's nodes, `(batch, length + nodes)`, from [`TokenTree.slot_depths`]."""
        if self.positions.shape[1] == 1:
            return self.positions + slot_depths
        return torch.cat([self.positions[:, :-1], self.anchor_positions + slot_depths], dim=1)


@dataclass
class Prompt:
    """The prompt, and how its padding was left out.

    Attributes:
        text: what the target and the drafter read, items of different lengths padded on the left.
        columns: for each item, where in the caller's prompt its tokens stand.
        axes: `(axes, batch, length)` or `None`, the positions of a target that has several per token (M-RoPE).
        extra: what else the target's first forward needs (an image, say), laid out as the text is.
    """

    text: PendingTokens
    columns: list[list[int]]
    axes: torch.LongTensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def after(self, num_cached: list[int]) -> "Prompt":
        """Without the first tokens of each item, `num_cached (batch,)` of them, which an earlier call's cache holds."""
        length = self.text.ids.shape[1]
        counts = [
            count - cached
            for count, cached in zip(self.text.counts or [length] * len(num_cached), num_cached, strict=True)
        ]
        new = slice(length - max(counts), None)
        uneven = None if min(counts) == max(counts) else counts
        text = PendingTokens(self.text.ids[:, new], self.text.positions[:, new], uneven)
        axes = None if self.axes is None else self.axes[:, :, new]
        extra = {
            name: value[:, new] if has_a_column_per_token(value, self.text.ids) else value
            for name, value in self.extra.items()
        }
        return Prompt(text, self.columns, axes, extra)


def prompt_without_padding(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> Prompt:
    """Drop masked-out columns of `input_ids (batch, length)`: no token attends to them, so items decode the same without."""
    batch, length = input_ids.shape
    attention_mask = model_kwargs.get("attention_mask")
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    positions, axes = model_kwargs.get("position_ids"), None
    if positions is None or positions.ndim == 3:
        positions, axes = (real.long().cumsum(dim=1) - 1).clamp(min=0), positions
    positions = positions.expand(batch, -1)
    extra = first_inputs(model_kwargs)
    if bool(real.all()):
        return Prompt(PendingTokens(input_ids, positions), [list(range(length))] * batch, axes, extra)
    counts = real.sum(dim=1).tolist()
    order = real.long().argsort(dim=1, stable=True)[:, length - max(counts) :]
    columns = [item[len(item) - count :] for item, count in zip(order.tolist(), counts, strict=True)]
    text = PendingTokens(
        input_ids.gather(1, order), positions.gather(1, order), None if min(counts) == max(counts) else counts
    )
    if axes is not None:
        axes = axes[:, :, order[0]] if batch == 1 else axes.gather(2, order.expand(len(axes), -1, -1))
    extra = {
        name: value.gather(1, order) if has_a_column_per_token(value, input_ids) else value
        for name, value in extra.items()
    }
    return Prompt(text, columns, axes, extra)


def first_inputs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What besides the text goes into the target's first forward: an image (or what an encoder made of it), and where it is."""
    return {
        name: value
        for name, value in model_kwargs.items()
        if name not in HANDLED and (isinstance(value, torch.Tensor) or (name == ENCODED_MEDIA and value))
    }


def has_a_column_per_token(value: Any, ids: torch.LongTensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == ids.shape
