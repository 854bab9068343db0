"""A target that writes a script, and drafters that know it as well as they are told: true shapes, invented acceptance.

Both models run their real forwards. Only what comes out is changed: the target's next token is the script's, whatever it was
asked and at whatever temperature, and the drafter's guesses are right with given probabilities. That costs each forward a few
small operations, those of plain `generate` too.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .acceptance_profile import AcceptanceProfile
from .entries import Entry

# Far beyond the logits of real models. These and their neighbours are whole numbers in bfloat16.
SURE = 128.0
SECOND = 127.0
NO_SCRIPT = "a simulation needs a target that is told the positions of its tokens, one for each"


@dataclass(frozen=True)
class Script:
    """For each position of a text, its token and two others: `right`, `wrong` and `other`, `(length,)` each."""

    right: torch.LongTensor
    wrong: torch.LongTensor
    other: torch.LongTensor

    def to(self, device: torch.device) -> "Script":
        return Script(self.right.to(device), self.wrong.to(device), self.other.to(device))


def write_script(vocab_size: int, length: int, avoid: set[int], seed: int = 0) -> Script:
    """A random text without the tokens to `avoid`, such as those that end a text.

    Raises:
        ValueError: if there are not three tokens to choose from.
    """
    allowed = torch.tensor([token for token in range(vocab_size) if token not in avoid])
    if len(allowed) < 3:
        raise ValueError(f"a simulation needs three tokens that end no text, got {len(allowed)}")
    chosen = torch.randint(len(allowed), (length,), generator=torch.Generator().manual_seed(seed))
    return Script(*(allowed[(chosen + step) % len(allowed)] for step in range(3)))


class Simulation:
    """Makes `generate` calls follow a script; see [`during`].

    Args:
        target: the model to be told what to write.
        script: at least as long as the longest text and one draft.
        profile: how often drafts are right.
        runner_up: the share of wrong drafts whose second choice is right, which trees can make use of.

    Raises:
        ValueError: if the target's forward is not told positions.
    """

    def __init__(
        self, target: PreTrainedModel, script: Script, profile: AcceptanceProfile, runner_up: float = 0.0
    ) -> None:
        if "position_ids" not in inspect.signature(target.forward).parameters:
            raise ValueError(f"{NO_SCRIPT}; {type(target).__name__} takes no position_ids")
        self.target = target
        self.profile = profile
        self.runner_up = runner_up
        self._scripts = {torch.device("cpu"): script}
        self._inside = False
        self._anchor: torch.LongTensor | None = None

    @contextmanager
    def during(self, entry: Entry) -> Iterator[None]:
        """Let the calls inside be simulated."""
        with ExitStack() as stack:

            def hook(handle: Any) -> None:
                stack.callback(handle.remove)

            hook(self.target.register_forward_pre_hook(self._before_target))
            hook(self.target.register_forward_hook(self._after_target, with_kwargs=True))
            if entry.is_parallel:
                rates = torch.tensor(self.profile.rates(depth_of(entry)), device=entry.assistant.device)
                stack.enter_context(self._guessing(entry.assistant, rates))
            elif entry.assistant is not None:
                # transformers' own DFlash loop asks the drafter for states, and the target's head for logits.
                depth = entry.assistant.config.block_size - 1
                rates = torch.tensor(self.profile.rates(depth), device=entry.assistant.device)
                hook(entry.assistant.register_forward_pre_hook(self._note_anchor, with_kwargs=True))
                hook(self.target.get_output_embeddings().register_forward_hook(self._after_head(rates)))
            yield

    @contextmanager
    def _guessing(self, drafter: PreTrainedModel, rates: torch.Tensor) -> Iterator[None]:
        """Let `drafter.draft` do its work, and then change its mind."""
        draft = drafter.draft

        def guess_instead(context, state, depth):
            logits = draft(context, state, depth)
            return self._guess(logits, context.new_positions[:, -1:], rates)

        drafter.draft = guess_instead
        try:
            yield
        finally:
            del drafter.draft

    def _guess(self, logits: torch.Tensor, anchors: torch.LongTensor, rates: torch.Tensor) -> torch.Tensor:
        """Prefer in `logits (batch, depth, vocab)` what the simulated drafter says behind anchors `(batch, 1)`; in place."""
        device, depth = logits.device, logits.shape[1]
        script = self._script(device)
        places = anchors.to(device) + torch.arange(1, depth + 1, device=device)
        right = torch.rand(places.shape, device=device) < rates[:depth].to(device)
        first = torch.where(right, script.right[places], script.wrong[places])
        if self.runner_up:
            is_second = ~right & (torch.rand(places.shape, device=device) < self.runner_up)
            second = torch.where(is_second, script.right[places], script.other[places])
            logits.scatter_(2, second[..., None], SECOND)
        return logits.scatter_(2, first[..., None], SURE)

    def _script(self, device: torch.device) -> Script:
        if device not in self._scripts:
            self._scripts[device] = self._scripts[torch.device("cpu")].to(device)
        return self._scripts[device]

    def _before_target(self, module, args) -> None:
        self._inside = True

    def _after_target(self, module, args, kwargs, outputs) -> None:
        """Make the target sure of the script's next token behind each one that it read."""
        self._inside = False
        logits, positions = outputs.logits, kwargs.get("position_ids")
        if positions is None or positions.ndim != 2:
            raise ValueError(f"{NO_SCRIPT}; {type(module).__name__} was given {positions}")
        read = positions[:, positions.shape[1] - logits.shape[1] :].to(logits.device)
        # Rows that are padded on the left may have any position there.
        following = self._script(logits.device).right[read.clamp(min=0) + 1].expand(logits.shape[0], -1)
        logits.scatter_(2, following[..., None], SURE)

    def _note_anchor(self, module, args, kwargs) -> None:
        self._anchor = kwargs["position_ids"][:, -module.config.block_size, None]

    def _after_head(self, rates: torch.Tensor):
        def hook(module, args, logits):
            if not self._inside and self._anchor is not None:
                self._guess(logits, self._anchor, rates)

        return hook


def depth_of(entry: Entry) -> int:
    """How many tokens a drafter's entry drafts a round."""
    return entry.assistant.checked_depth(entry.setting.get("num_assistant_tokens"))
