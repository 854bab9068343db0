"""The random numbers that plain `generate` draws its tokens with, drawn ahead of their use, in its order."""

import threading
import weakref

import torch

# Noise is held for items that are slower than others as long as it takes no more than this.
MOST_BYTES = 1 << 26
# More than the steps of a round are held for so many, at most.
MOST_STEPS = 1 << 12

# Calls that draw ahead from torch's own generators now, each with its thread; and what one of them holds while it draws.
_calls: "weakref.WeakKeyDictionary[StepNoise, int]" = weakref.WeakKeyDictionary()
_drawing = threading.RLock()


def generator_state(device: torch.device) -> torch.Tensor:
    """Where torch's own generator of a device stands, as a tensor of bytes on the CPU."""
    return _random_of(device).get_rng_state(*_index_of(device))


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Go back, or ahead, to a state of [`generator_state`]."""
    _random_of(device).set_rng_state(state, *_index_of(device))


def _random_of(device: torch.device):
    # A device without a module has no generator of its own.
    return torch if device.type == "cpu" else vars(torch).get(device.type, torch)


def _index_of(device: torch.device) -> tuple[torch.device, ...]:
    return (device,) if device.type not in ("cpu", "mps") and device.type in vars(torch) else ()


class StepNoise:
    """What every step of plain `generate` draws its tokens with, for items that stand at different steps.

    Step t of plain `generate` calls `torch.multinomial(p, 1)` for the whole batch, which is `(p / q).argmax(-1)` with
    `q = torch.empty_like(p).exponential_(1)` (the Gumbel trick). So q of step t, `(batch, vocab)`, doesn't depend on any text: it
    is drawn here in plain `generate`'s order, and used wherever the t-th new token of an item is chosen, or guessed.

    An item holds noise for its next steps in a window of its own. What doesn't fit into the window of an item that is slower
    than the others is drawn again, from the state that the generator had before that step, when the item gets there. The window
    takes the round's own steps, and more if the batch's windows together stay below `MOST_BYTES`: so what is held is at most
    the larger of 64 MiB and `steps of a round x batch x vocab x 4` bytes, which is what the logits of a chain take; and for
    every step from the slowest item's to the fastest's a state, 5 kB on a CPU and 16 bytes on a GPU.

    All threads have one generator. A call that begins where one in another thread has left it would draw what that one is going
    to, and might write the same text: it gets a generator of its own instead, which begins anywhere, since the order in which
    threads draw is no matter of a seed without a drafter either.

    Args:
        batch: items of the call.
        device: where tokens are chosen.
        most: steps of a round, at most: one more than tokens are drafted.

    Attributes:
        generator: the call's own; `None` for torch's.
    """

    def __init__(self, batch: int, device: torch.device, most: int) -> None:
        self.batch, self.device, self.most = batch, device, most
        self.live = list(range(batch))
        # For each item the step of its next token, and the first step whose noise it doesn't hold.
        self.steps, self.held_until = [0] * batch, [0] * batch
        self.generator: torch.Generator | None = None
        with _drawing:
            state = generator_state(device)
            if self._is_taken(state):
                self.generator = torch.Generator(device)
                self.generator.seed()
                state = self.generator.get_state()
            else:
                _calls[self] = threading.get_ident()
        # The states before the steps from `first_state` on, and before the first that nobody has drawn yet; and the last one in
        # which this call has left the generator.
        self.states, self.first_state, self.left = [state], 0, state
        self.window: torch.Tensor | None = None

    def ahead(self, count: int, vocab: int) -> torch.Tensor:
        """The noise of the next `count` steps of each item that is left, `(items, count, vocab)` in float32."""
        if self.window is None:
            size = max(self.most, min(MOST_BYTES // (4 * self.batch * vocab), MOST_STEPS) if self.batch > 1 else 0)
            self.window = torch.empty(size, self.batch, vocab, dtype=torch.float32, device=self.device)
        self._forget_old_states()
        while True:
            short = [item for item in self.live if self.held_until[item] < self.steps[item] + count]
            if not short:
                break
            self._hold(min(self.held_until[item] for item in short))
        places = [[(self.steps[item] + ahead) % len(self.window) for ahead in range(count)] for item in self.live]
        if len(self.live) == self.batch and all(own == places[0] for own in places):
            return self.window[places[0]].transpose(0, 1)
        items = torch.tensor(self.live, device=self.device)[:, None]
        return self.window[torch.tensor(places, device=self.device), items]

    def advance(self, counts: list[int]) -> None:
        """Each item that is left got so many tokens."""
        for item, count in zip(self.live, counts, strict=True):
            self.steps[item] += count
            self.held_until[item] = max(self.held_until[item], self.steps[item])

    def select_items(self, kept: list[int]) -> None:
        """Go on with only some of the items that are left."""
        self.live = [self.live[index] for index in kept]

    def found_before(self, step: int) -> None:
        """The generator itself stands before a step that all items have next, for others draw from it as well.

        Where that is elsewhere than it was thought to be (a logits processor draws, too, say), what was drawn ahead is not what
        plain `generate` is going to use, and is forgotten.
        """
        self._forget_old_states()
        self.left = state = self._state()
        index = step - self.first_state
        if index < len(self.states) and torch.equal(self.states[index], state):
            return
        self.states[index:] = [state]
        self.held_until = [min(until, step) for until in self.held_until]

    def go_to(self, step: int) -> None:
        """Set the generator to where plain `generate` has it before a step; it has drawn for those before, for all items."""
        with _drawing:
            self.left = self.states[step - self.first_state]
            if self.generator is None:
                set_generator_state(self.device, self.left)
            else:
                self.generator.set_state(self.left)

    def draw(self, law: torch.Tensor, step: int) -> torch.LongTensor:
        """What the generator itself, which stands before this step, draws of a law `(batch, vocab)` for all items; `(batch,)`."""
        with _drawing:
            drawn = torch.multinomial(law, num_samples=1, generator=self.generator).squeeze(1)
            self.found_before(step + 1)
        return drawn

    def close(self) -> None:
        """This call draws no more."""
        with _drawing:
            _calls.pop(self, None)

    def _is_taken(self, state: torch.Tensor) -> bool:
        """Whether a call in another thread goes on from a state."""
        this = threading.get_ident()
        others = [call for call, thread in [*_calls.items()] if thread != this and call.device == self.device]
        return any(torch.equal(call.left, state) for call in others)

    def _state(self) -> torch.Tensor:
        return generator_state(self.device) if self.generator is None else self.generator.get_state()

    def _hold(self, step: int) -> None:
        """Draw a step's noise, and keep it for the items that have it next and have room for it."""
        place = step % len(self.window)
        takers = [
            item for item in self.live if self.held_until[item] == step and step < self.steps[item] + len(self.window)
        ]
        with _drawing:
            self.go_to(step)
            if len(takers) == self.batch:
                self.window[place].exponential_(generator=self.generator)
            else:
                items = torch.tensor(takers, device=self.device)
                drawn = torch.empty_like(self.window[place]).exponential_(generator=self.generator)
                self.window[place, items] = drawn[items]
            if step + 1 - self.first_state == len(self.states):
                self.states.append(self._state())
            self.left = self.states[step + 1 - self.first_state]
        for item in takers:
            self.held_until[item] = step + 1

    def _forget_old_states(self) -> None:
        num_old = min(self.steps[item] for item in self.live) - self.first_state
        if num_old > 0:
            del self.states[:num_old]
            self.first_state += num_old
