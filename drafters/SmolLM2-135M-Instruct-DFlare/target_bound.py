"""Drafters that read one target's hidden states and borrow its embedding, so that they fit this target and no other."""

from typing import Any, ClassVar, NoReturn

from transformers import PreTrainedModel

from .base import ParallelDrafter, text_fact


class TargetBoundDrafter(ParallelDrafter):
    """What [`ParallelDrafter`] is, of a drafter as wide as its target (`hidden_size`, `target_hidden_size` of its config).

    Attributes:
        has_own_head: whether it does without the target's head.
    """

    has_own_head: ClassVar[bool] = False

    @property
    def reads_target(self) -> bool:
        return True

    def get_input_embeddings(self) -> None:
        """There are none of its own, and what shards or saves a model is not to look for them."""
        return

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a `ValueError`: such a drafter can't go on from a text without the target's states of it."""
        raise ValueError(
            f"a {type(self).__name__} drafts from a target's hidden states, and writes no text by itself: import "
            "hf_pardraft, and call target.generate(..., assistant_model=drafter)"
        )

    def check_target(self, target: PreTrainedModel, taps: list[int] | None = None) -> None:
        """See [`ParallelDrafter.check_target`]; the widths must agree too."""
        width = text_fact(target, "hidden_size")
        expected = {self.config.hidden_size, self.config.target_hidden_size}
        if expected != {width}:
            raise ValueError(
                f"the drafter has hidden size {self.config.hidden_size} and reads hidden states of size "
                f"{self.config.target_hidden_size}, but the target's are of size {width}: it borrows the target's embedding, so "
                f"all must agree. Make a drafter for this target with {type(self).__name__}.for_target"
            )
        super().check_target(target, taps)
