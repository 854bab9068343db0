"""Layouts of training batches, one class each: collate, mask, supervised positions, forward. A drafter's kind says which."""

from transformers import PreTrainedModel

from .anchored_blocks import AnchoredBlocks
from .base import Layout
from .dropped_masks import DroppedMasks
from .shared_prefixes import SharedPrefixes

LAYOUTS = {"dropped_masks": DroppedMasks, "anchored_blocks": AnchoredBlocks, "shared_prefix": SharedPrefixes}


def layout_of(drafter: PreTrainedModel) -> type[Layout]:
    """The layout that a drafter learns from."""
    return LAYOUTS[drafter.training_layout]
