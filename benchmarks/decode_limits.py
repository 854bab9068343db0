"""How fast rounds could be: their two forwards and nothing else, and the time that reading the weights takes.

The forwards are repeated in turns where they stand, in the middle of a run: same shapes, same caches, same masks. What the loop
does between them (building a tree, the stop checks, handing tokens out) is left out.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_pardraft.generation.compiled import steps as steps
from hf_pardraft.generation.compiled.compiler import Compiler
from hf_pardraft.generation.tree.token_tree import TokenTree
from hf_pardraft.models.base import ParallelDrafter
from hf_pardraft.pairing.gathered_rows import dtype_of_rows

# CUDA graphs are recorded in a function's first calls.
WARM_UP = 4
PIECES = {steps.draft: "draft", steps.read_and_commit: "verify"}
# On a CPU, rounds are compiled as a whole, which is faster than its parts.
WHOLE = steps.read_commit_and_draft
Times = dict[str, list[float]]


@dataclass
class Forward:
    """One of a round's forwards, ready to be repeated.

    Attributes:
        part: of the round, "draft" or "verify".
        call: runs it.
        prepare, undo: called before and after it, off the clock.
    """

    part: str
    call: Callable[[], Any]
    prepare: Callable[[], None] = lambda: None
    undo: Callable[[], None] = lambda: None


def seconds_of_rounds(forwards: list[Forward], repeats: int, device: torch.device) -> Times:
    """Seconds of each of `repeats` rounds of nothing but forwards, by part, behind some that don't count.

    One follows the other as in a round, and finds in the processor's caches what the other has left there. On an accelerator the
    host runs ahead, as far as the calls let it.
    """
    warm_up = WARM_UP if device.type == "cuda" else 1
    clock = Clock(device)
    for _ in range(repeats + warm_up):
        for forward in forwards:
            forward.prepare()
            with clock.timing(forward.part):
                forward.call()
            forward.undo()
        clock.end_round()
    return {part: seconds[warm_up:] for part, seconds in clock.seconds().items()}


class Clock:
    """Times the parts of rounds, on an accelerator without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.rounds: list[list[tuple[str, Any, Any]]] = [[]]

    def _now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        started = self._now()
        yield
        self.rounds[-1].append((part, started, self._now()))

    def end_round(self) -> None:
        self.rounds.append([])

    def seconds(self) -> Times:
        """By part, of each round that has ended."""
        if self.is_cuda:
            torch.cuda.synchronize()
        found: Times = {}
        for marks in self.rounds[:-1]:
            sums: dict[str, float] = {}
            for part, start, end in marks:
                seconds = start.elapsed_time(end) / 1000 if self.is_cuda else end - start
                sums[part] = sums.get(part, 0.0) + seconds
            for part, seconds in sums.items():
                found.setdefault(part, []).append(seconds)
        return found


class EagerForwards:
    """Repeats the forwards of one round: the drafter's, and those of what it borrows of the target; the target's.

    Args:
        target, drafter: the models.
        at: how many forwards of the target come before that round.
        repeats: of the round.
    """

    def __init__(self, target: PreTrainedModel, drafter: ParallelDrafter, at: int, repeats: int) -> None:
        self.target, self.drafter, self.at, self.repeats = target, drafter, at, repeats
        self.found: list[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], int]] = []
        self.times: Times = {}
        self.inside = self.rounds = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context for one `generate` call."""
        borrowed = [self.target.get_input_embeddings(), self.target.get_output_embeddings()]
        with ExitStack() as stack:
            for module in (*borrowed, self.drafter, self.target):
                # Before all other hooks: a simulation must see each call, too.
                before = module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
                after = module.register_forward_hook(self._after)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _before(self, module, args, kwargs) -> None:
        self.inside += 1
        if self.inside == 1 and self.rounds == self.at:
            self.found.append((module, args, kwargs, entries_in(kwargs.get("past_key_values"))))
        if self.inside == 1 and module is self.target:
            if self.rounds == self.at:
                self._repeat()
            self.rounds += 1

    def _after(self, module, args, output) -> None:
        self.inside -= 1

    def _repeat(self) -> None:
        caches = [kwargs.get("past_key_values") for _, _, kwargs, _ in self.found]
        now = [entries_in(cache) for cache in caches]
        self.times = seconds_of_rounds([self._forward(*each) for each in self.found], self.repeats, self.target.device)
        for (module, args, kwargs, _), cache, num_entries in zip(self.found, caches, now, strict=True):
            # What the drafter had read in this round is not there any more.
            if entries_in(cache) < num_entries:
                module(*args, **kwargs)
                crop(cache, num_entries)

    def _forward(self, module, args, kwargs, num_entries: int) -> Forward:
        cache = kwargs.get("past_key_values")
        part = "verify" if module is self.target else "draft"
        back = partial(crop, cache, num_entries)
        return Forward(part, lambda: module(*args, **kwargs), prepare=back, undo=back)

    def seconds(self) -> Times:
        """Of each repeat, by part: the sum of its forwards."""
        return self.times


def entries_in(cache: Any) -> int:
    return 0 if cache is None else cache.get_seq_length()


def crop(cache: Any, num_entries: int) -> None:
    """Leave the first entries of a cache."""
    if entries_in(cache) > num_entries:
        cache.crop(num_entries - entries_in(cache))


class CompiledForwards:
    """[`EagerForwards`] for compiled rounds: the compiled steps with forwards in them; verifying includes committing.

    Where rounds are compiled as a whole, the steps are compiled for this.

    Args:
        target: the model.
        at: how many compiled rounds come before.
        repeats: of the round.
    """

    def __init__(self, target: PreTrainedModel, at: int, repeats: int) -> None:
        self.device, self.at, self.repeats = target.device, at, repeats
        self.rounds = 0
        self.draft: Forward | None = None
        self.times: Times = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context for one `generate` call."""
        original, watcher = Compiler.__call__, self

        def watched(compiler, step, shape, *arguments):
            run, is_now = partial(original, compiler), watcher.rounds >= watcher.at and not watcher.times
            if step is steps.draft and is_now:
                watcher.draft = forward_of(run, step, shape, arguments)
            if step is steps.read_and_commit and is_now and watcher.draft:
                watcher.repeat([watcher.draft, forward_of(run, step, shape, arguments)])
            if step is WHOLE and is_now:
                target, drafter, tree, _, _ = arguments
                verify = forward_of(run, steps.read_and_commit, shape, (target, tree, drafter.inputs))
                watcher.repeat([verify, forward_of(run, steps.draft, shape, (drafter, target.decode_state))])
            watcher.rounds += step in (steps.read_and_commit, WHOLE)
            return original(compiler, step, shape, *arguments)

        Compiler.__call__ = watched
        try:
            yield
        finally:
            Compiler.__call__ = original

    def repeat(self, forwards: list[Forward]) -> None:
        """Time rounds of some forwards."""
        self.times = seconds_of_rounds(forwards, self.repeats, self.device)

    def seconds(self) -> Times:
        """Of each repeat, by part."""
        return self.times


def forward_of(run: Callable, step: Callable, shape: Any, arguments: tuple[Any, ...]) -> Forward:
    """A compiled step, to be repeated from where everything stands now. What it changes is as before when it has run."""
    # What other steps left may be gone when this one has run.
    arguments = tuple(own(value) if isinstance(value, TokenTree) else value for value in arguments)
    changed = steps.changing(arguments)
    at_first = [tensor.clone() for tensor in changed]
    before = [tensor.clone() for tensor in changed]

    def prepare() -> None:
        for tensor, saved, first in zip(changed, before, at_first, strict=True):
            saved.copy_(tensor)
            tensor.copy_(first)
        torch.compiler.cudagraph_mark_step_begin()

    def undo() -> None:
        for tensor, saved in zip(changed, before, strict=True):
            tensor.copy_(saved)

    return Forward(PIECES[step], lambda: run(step, shape, *arguments), prepare, undo)


def own(tree: TokenTree) -> TokenTree:
    """A copy of what steps made of a tree; the rest of a chain is a constant."""
    if tree.is_chain:
        return replace(tree, tokens=tree.tokens.clone())
    return TokenTree(tree.tokens.clone(), tree.parents.clone(), tree.depths.clone(), tree.ancestors.clone())


def medians(times: Times) -> dict[str, float]:
    return {name: median(values) for name, values in times.items()}


def bytes_read(target: PreTrainedModel, drafter: ParallelDrafter) -> int:
    """Bytes of weights that the two forwards of a round read. Of embeddings they read a few rows only."""
    borrows_head = drafter.config.drafter_kind in ("dflash", "dflare")
    own_embeddings = drafter.get_input_embeddings() if drafter.config.drafter_kind == "pard" else None
    total = weight_bytes(target, target.get_input_embeddings()) + weight_bytes(drafter, own_embeddings)
    if not borrows_head:
        return total
    head, proposed = target.get_output_embeddings(), drafter.config.draft_vocab_size
    if not proposed:
        return total + weight_bytes(head)
    whole = target.config.vocab_size * head.weight.dtype.itemsize
    return total + weight_bytes(head) * proposed * dtype_of_rows(drafter, head).itemsize // whole


def weight_bytes(model: torch.nn.Module, embeddings: torch.nn.Module | None = None) -> int:
    """Bytes of a model's parameters, without its input embeddings unless these are its head, too."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    if embeddings is None or model.get_output_embeddings().weight is embeddings.weight:
        return total
    return total - embeddings.weight.nbytes


def memory_bandwidth(device: torch.device) -> float | None:
    """Bytes a second that an accelerator reads and writes, measured by copying 1 GiB; `None` on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    times = seconds_of_rounds([Forward("copy", lambda: destination.copy_(source))], 20, device)
    return 2 * source.nbytes / median(times["copy"])
