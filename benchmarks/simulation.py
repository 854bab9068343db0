"""A target that writes a script, and drafters that know it as well as they are told: true shapes, invented acceptance.

Both models run their real forwards. Only what comes out is changed: the target's next token is the script's, whatever it was
asked and at whatever temperature, and the drafter's guesses are right with given probabilities. That costs each forward a few
small operations, those of plain `generate` too. It is luck whether a guess is right, and every loop meets the same luck at the
same place of the same batch item, so that loops differ in time and not in tau. All of this can be compiled.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from acceptance_profile import AcceptanceProfile, expected_tau
from hf_pardraft.evaluation.entries import Entry

# Far beyond the logits of real models. These and their neighbours are whole numbers in bfloat16.
SURE = 128.0
SECOND = 127.0
# How many numbers luck is made of, and how far from one another those of neighbouring places and of neighbouring items are.
LUCK_SIZE = 65521
PLACE_STEP = 127
ITEM_STEP = 16411
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
        seed: of the luck.

    Raises:
        ValueError: if the target's forward is not told positions.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        script: Script,
        profile: AcceptanceProfile,
        runner_up: float = 0.0,
        seed: int = 0,
    ) -> None:
        if "position_ids" not in inspect.signature(target.forward).parameters:
            raise ValueError(f"{NO_SCRIPT}; {type(target).__name__} takes no position_ids")
        self.target = target
        self.profile = profile
        self.runner_up = runner_up
        generator = torch.Generator().manual_seed(seed)
        self._known = {torch.device("cpu"): (script, torch.rand(2, LUCK_SIZE, generator=generator))}
        self._guessers: dict[tuple[int, int], dict[str, Any]] = {}
        self._inside = False
        self._anchor: torch.LongTensor | None = None

    @contextmanager
    def during(self, entry: Entry) -> Iterator[None]:
        """Let the calls inside be simulated."""
        with ExitStack() as stack:

            def hook(handle: Any) -> None:
                stack.callback(handle.remove)

            hook(self.target.register_forward_hook(self._after_target, with_kwargs=True))
            if entry.is_parallel:
                stack.enter_context(self._guessing(entry))
            elif entry.assistant is not None:
                # transformers' own DFlash loop asks the drafter for states, and the target's head for logits.
                depth = entry.assistant.config.block_size - 1
                rates = torch.tensor(self.profile.rates(depth), device=entry.assistant.device)
                hook(self.target.register_forward_pre_hook(self._enter_target))
                hook(self.target.register_forward_hook(self._leave_target))
                hook(entry.assistant.register_forward_pre_hook(self._note_anchor, with_kwargs=True))
                hook(self.target.get_output_embeddings().register_forward_hook(self._after_head(rates)))
            yield

    @contextmanager
    def _guessing(self, entry: Entry) -> Iterator[None]:
        """Let the drafter do its work, and then change its mind."""
        drafter, depth = entry.assistant, depth_of(entry)
        key = (id(drafter), depth)
        # Always the same functions: others would be compiled anew.
        if key not in self._guessers:
            self._guessers[key] = self._guessers_for(drafter, depth)
        vars(drafter).update(self._guessers[key])
        try:
            yield
        finally:
            for name in self._guessers[key]:
                delattr(drafter, name)

    def _guessers_for(self, drafter: PreTrainedModel, depth: int) -> dict[str, Any]:
        """What takes the place of the two ways to draft: in rounds of any shape, and in compiled ones."""
        rates = torch.tensor(self.profile.rates(depth), device=drafter.device)
        draft, draft_static = drafter.draft, drafter.draft_static

        def guess_instead(context, state, depth):
            logits = draft(context, state, depth)
            return self._guess(logits, context.new_positions[:, -1:], rates)

        def guess_news_instead(news, state, lengths, depth):
            # The news are none any more once they are drafted from.
            anchors = news.last(news.positions)
            return self._guess(draft_static(news, state, lengths, depth), anchors, rates)

        return {"draft": guess_instead, "draft_static": guess_news_instead}

    def _guess(self, logits: torch.Tensor, anchors: torch.LongTensor, rates: torch.Tensor) -> torch.Tensor:
        """Prefer in `logits (batch, depth, vocab)` what the simulated drafter says after anchors `(batch, 1)`; in place."""
        device, (batch, depth) = logits.device, logits.shape[:2]
        script, luck = self._on(device)
        anchors, rates = anchors.to(device), rates[:depth].to(device)
        places = anchors + torch.arange(1, depth + 1, device=device)
        drawn = luck_indices(anchors, depth, torch.arange(batch, device=device)[:, None])
        right = luck[0][drawn] < rates
        first = torch.where(right, script.right[places], script.wrong[places])
        if self.runner_up:
            is_second = ~right & (luck[1][drawn] < self.runner_up)
            second = torch.where(is_second, script.right[places], script.other[places])
            logits.scatter_(2, second[..., None], SECOND)
        return logits.scatter_(2, first[..., None], SURE)

    def tau(self, first: int, last: int, depth: int) -> float:
        """What its luck makes of the profile: mean tokens of the rounds of a chain, in the first item of a batch.

        Args:
            first, last: positions in the text between which the rounds begin.
            depth: tokens drafted a round.
        """
        luck = self._on(torch.device("cpu"))[1][0]
        anchors = torch.arange(first, last)[:, None]
        right = luck[luck_indices(anchors, depth, 0)] < torch.tensor(self.profile.rates(depth))
        lengths = (right.long().cumprod(dim=1).sum(dim=1) + 1).tolist()
        rounds, anchor = 0, first
        while anchor < last:
            anchor += lengths[anchor - first]
            rounds += 1
        return (anchor - first) / rounds

    def _on(self, device: torch.device) -> tuple[Script, torch.Tensor]:
        """Script and luck, `(2, LUCK_SIZE)`, on a device."""
        if device not in self._known:
            script, luck = self._known[torch.device("cpu")]
            self._known[device] = (script.to(device), luck.to(device))
        return self._known[device]

    def _enter_target(self, module, args) -> None:
        self._inside = True

    def _leave_target(self, module, args, outputs) -> None:
        self._inside = False

    def _after_target(self, module, args, kwargs, outputs) -> None:
        """Make the target sure of the script's next token after each one that it read."""
        logits, positions = outputs.logits, kwargs.get("position_ids")
        if positions is None or positions.ndim != 2:
            raise ValueError(f"{NO_SCRIPT}; {type(module).__name__} was given {positions}")
        read = positions[:, positions.shape[1] - logits.shape[1] :].to(logits.device)
        # Items that are padded on the left may have any position there.
        script, _ = self._on(logits.device)
        following = script.right[read.clamp(min=0) + 1].expand(logits.shape[0], -1)
        logits.scatter_(2, following[..., None], SURE)

    def _note_anchor(self, module, args, kwargs) -> None:
        self._anchor = kwargs["position_ids"][:, -module.config.block_size, None]

    def _after_head(self, rates: torch.Tensor):
        def hook(module, args, logits):
            if not self._inside and self._anchor is not None:
                self._guess(logits, self._anchor, rates)

        return hook


def luck_indices(anchors: torch.LongTensor, depth: int, items: torch.LongTensor | int) -> torch.LongTensor:
    """Which numbers decide on drafts after anchors `(n, 1)` in batch items `(n, 1)`, `(n, depth)`."""
    return (anchors * PLACE_STEP + items * ITEM_STEP + torch.arange(depth, device=anchors.device)) % LUCK_SIZE


def fair_simulation(
    target: PreTrainedModel,
    script: Script,
    profile: AcceptanceProfile,
    runner_up: float,
    first: int,
    last: int,
    depth: int,
    most_seeds: int = 100,
) -> Simulation:
    """Of many simulations the one whose luck between two positions is nearest to what `profile` promises.

    A text of a few hundred tokens has so few rounds that by mere luck its tau is often 10 % off. See [`Simulation.tau`].
    """
    promised = expected_tau(profile.rates(depth))
    simulations = (Simulation(target, script, profile, runner_up, seed) for seed in range(most_seeds))
    return min(simulations, key=lambda simulation: abs(simulation.tau(first, last, depth) - promised))


def depth_of(entry: Entry) -> int:
    """How many tokens a drafter's entry drafts a round."""
    return entry.assistant.checked_depth(entry.setting.get("num_assistant_tokens"))
