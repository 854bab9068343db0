"""Configuration of a DART drafter: one Llama-like layer that reads a target's hidden states (arXiv 2601.19278, section 3.2)."""

from typing import Any, ClassVar

from transformers import LlamaConfig

from .base import PairedConfig


def published_tapped_hidden_states(num_target_layers: int) -> list[int]:
    """Which of a target's hidden states a published drafter reads, as indices into `hidden_states`: what enters layers 2, L//2
    and L - 3 (arXiv 2601.19278, appendix B counts the layers that these come out of). Below seven layers some coincide.

    Raises:
        ValueError: if the target has fewer than three layers, which don't have all of them.
    """
    if num_target_layers < 3:
        raise ValueError(
            f"published DART drafters read what enters layers 2, L//2 and L-3, so at least 3, of a target, got "
            f"{num_target_layers}: make a drafter for this target with DartDrafter.for_target"
        )
    return [2, num_target_layers // 2, num_target_layers - 3]


class DartConfig(PairedConfig, LlamaConfig):
    """A Llama configuration of the drafter's one layer, and how it is tied to its target.

    Args:
        draft_length: masks after the prefix, which is what the published configs count, and not the paper's draft length
            d. The last position of the prefix predicts too, so that d = draft_length + 1 tokens are drafted (8 with 7 masks);
            without `shifted` as many as there are masks. Where d is meant, say `draft_tokens` to `DartDrafter.for_target`.
        draft_vocab_size: how many tokens the drafter can propose; `None` for all. `vocab_size` is the target's.
        target_hidden_size: width of the target's hidden states; `None` for `hidden_size`.
        tapped_hidden_states: indices into the target's `hidden_states`; `None` follows
            [`published_tapped_hidden_states`] for whatever target the drafter is used with, as the published layout does.
        double_norm: apply the final norm twice before the lm_head, as the published implementation does.
        shifted: whether a position predicts the token after its own place, or the one at its place (arXiv 2601.19278, table 3).
        **kwargs: as for [`PairedConfig`], what it was trained with, and for the base configuration.
    """

    model_type = "dart"
    drafter_kind: ClassVar[str] = "dart"

    num_hidden_layers: int = 1
    draft_length: int = 7
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    tapped_hidden_states: list[int] | None = None
    double_norm: bool = False
    shifted: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)

    @property
    def num_taps(self) -> int:
        """How many hidden states are read; three by the published rule."""
        return 3 if self.tapped_hidden_states is None else len(self.tapped_hidden_states)
