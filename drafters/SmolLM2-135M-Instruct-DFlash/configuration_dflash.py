"""Configuration of a DFlash drafter: a Qwen3-like block-diffusion model fed with a target's hidden states."""

from typing import Any, ClassVar

from transformers import Qwen3Config

from .base import PairedConfig

# Of a target's `hidden_states`, whose first entry holds the embeddings: the output of layer i is entry i + 1, and the last entry
# is taken after the final norm.
FIRST_LAYER_OUTPUT = 1
# What published configs may say in dflash_config or beside it.
EITHER_PLACE = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """The target layers whose outputs are tapped where none are named, as 0-based layer numbers.

    The published rule: a single tap is layer L//2; otherwise they lie evenly from layer 1 to layer L - 3, rounded half to
    even. Where there are more taps than layers in between, some layers are tapped more than once, in that order: a checkpoint
    that names no layers has weights for each of them. A target of two layers, for which the rule asks for the last one, which
    can't be tapped, gives its first.

    Args:
        num_target_layers: L, depth of the target.
        num_taps: how many there are.

    Returns:
        `num_taps` numbers, not all different; a single one for a target of two layers.

    Raises:
        ValueError: if the target has fewer than two layers, or there is no tap.
    """
    if num_target_layers < 2:
        raise ValueError(f"a target needs at least 2 layers to be tapped, got {num_target_layers}")
    if num_taps < 1:
        raise ValueError(f"a drafter reads at least 1 layer of its target, got num_taps={num_taps}")
    if num_target_layers == 2:
        return [0]
    if num_taps == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    # Divided once, as the publishers do: a rounded step would miss the halves.
    return [round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps)]


class DFlashConfig(PairedConfig, Qwen3Config):
    """A Qwen3 configuration of the drafter's own layers, and how it is tied to its target.

    The published layout (a flat Qwen3 config with a nested `dflash_config`) is understood too.

    Args:
        block_size: tokens a block: the anchor and `block_size - 1` masks.
        mask_token_id: an id that the target's tokenizer leaves unused; its embedding is the target's.
        target_layer_ids: 0-based numbers of the target layers whose *outputs* are read.
        num_target_layers: depth of the target.
        vocab_size: the target's; 0 where the checkpoint does not say, until the drafter meets its target.
        target_hidden_size: width of the target's hidden states; `None` for `hidden_size`.
        draft_vocab_size: how many tokens the drafter proposes; `None` for all.
        own_head: whether it has their rows of the head itself (`lm_head.weight`), and doesn't read the target's.
        **kwargs: as for [`PairedConfig`], what it was trained with, and for the base configuration.
    """

    model_type = "dflash"
    drafter_kind: ClassVar[str] = "dflash"

    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    own_head: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        nested = kwargs.pop("dflash_config", None) or {}
        for name in EITHER_PLACE:
            if getattr(self, name) is None:
                setattr(self, name, nested.get(name))
        if self.block_size is None:
            self.block_size = 16
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, self.default_num_taps())
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)

    def default_num_taps(self) -> int:
        """How many target layers to tap where none are named: one per draft layer."""
        return self.num_hidden_layers
