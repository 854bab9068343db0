"""How fast rounds could be: their two forwards repeated by themselves, and the time that reading the weights takes.

The forwards are repeated where they stand, in the middle of a run: same shapes, same caches, same masks. What the loop does
between them (building a tree, the stop checks, handing tokens out) is left out.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_pardraft.generation import pieces
from hf_pardraft.generation.compiling import Compiler
from hf_pardraft.generation.tree import TokenTree
from hf_pardraft.models.drafting import ParallelDrafter

# CUDA graphs are recorded in a function's first calls.
WARM_UP = 4
PIECES = {pieces.draft: "draft", pieces.read_and_commit: "verify"}
# On a CPU, rounds are compiled as a whole, which is faster than its parts.
WHOLE = pieces.read_commit_and_draft
Times = dict[str, list[float]]


def seconds_of_calls(
    call: Callable[[], Any], undo: Callable[[], None], repeats: int, device: torch.device
) -> list[float]:
    """Seconds of each of `repeats` calls behind some that don't count; `undo` is called after each, off the clock.

    On an accelerator the host runs ahead, as far as the call lets it.
    """
    if device.type != "cuda":
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
            undo()
        return times[1:]
    marks = []
    for _ in range(repeats + WARM_UP):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        undo()
        marks.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in marks[WARM_UP:]]


class EagerForwards:
    """Repeats the forwards of one round: the target's; the drafter's, and those of what it borrows of the target.

    Args:
        target, drafter: the models.
        at: how many forwards of the target come before that round.
        repeats: of each forward.
    """

    def __init__(self, target: PreTrainedModel, drafter: ParallelDrafter, at: int, repeats: int) -> None:
        self.target, self.at, self.repeats = target, at, repeats
        self.modules = {
            "draft": [target.get_input_embeddings(), drafter, target.get_output_embeddings()],
            "verify": [target],
        }
        self.times: dict[str, list[list[float]]] = {name: [] for name in self.modules}
        self.inside = self.rounds = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context for one `generate` call."""
        with ExitStack() as stack:
            for name, modules in self.modules.items():
                for module in modules:
                    # Before all other hooks: a simulation must see each call, too.
                    before = module.register_forward_pre_hook(self._before(name), with_kwargs=True, prepend=True)
                    after = module.register_forward_hook(self._after)
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            yield

    def _before(self, name: str):
        def hook(module, args, kwargs):
            self.inside += 1
            if self.inside == 1 and self.rounds == self.at:
                self.times[name].append(self._repeated(module, args, kwargs))
            self.rounds += self.inside == 1 and module is self.target

        return hook

    def _after(self, module, args, output) -> None:
        self.inside -= 1

    def _repeated(self, module, args, kwargs) -> list[float]:
        cache = kwargs.get("past_key_values")
        num_cached = 0 if cache is None else cache.get_seq_length()

        def undo() -> None:
            if cache is not None:
                cache.crop(num_cached - cache.get_seq_length())

        return seconds_of_calls(lambda: module(*args, **kwargs), undo, self.repeats, self.target.device)

    def seconds(self) -> Times:
        """Of each repeat, by part: the sum of its forwards."""
        return {name: [sum(parts) for parts in zip(*times, strict=True)] for name, times in self.times.items()}


class CompiledForwards:
    """[`EagerForwards`] for compiled rounds: the compiled pieces with forwards in them; verifying includes committing.

    Where rounds are compiled as a whole, the pieces are compiled for this.

    Args:
        target: the model.
        at: how many compiled rounds come before.
        repeats: of each piece.
    """

    def __init__(self, target: PreTrainedModel, at: int, repeats: int) -> None:
        self.device, self.at, self.repeats = target.device, at, repeats
        self.rounds = 0
        self.times: Times = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context for one `generate` call."""
        original, watcher = Compiler.__call__, self

        def watched(compiler, piece, shape, *arguments):
            name = PIECES.get(piece)
            if piece is WHOLE and watcher.rounds == watcher.at:
                target, drafter, tree, _, _ = arguments
                watcher.repeat(original, compiler, pieces.read_and_commit, shape, [target, tree, drafter.news])
                watcher.repeat(original, compiler, pieces.draft, shape, [drafter, target.standing])
            elif name is not None and name not in watcher.times and watcher.rounds >= watcher.at:
                watcher.repeat(original, compiler, piece, shape, arguments)
            watcher.rounds += name == "verify" or piece is WHOLE
            return original(compiler, piece, shape, *arguments)

        Compiler.__call__ = watched
        try:
            yield
        finally:
            Compiler.__call__ = original

    def repeat(self, run: Callable, compiler: Compiler, piece: Callable, shape: Any, arguments: list[Any]) -> None:
        """Note how long a piece takes."""
        # What other pieces left may be gone when this one has run.
        arguments = [own(value) if isinstance(value, TokenTree) else value for value in arguments]
        self.times[PIECES[piece]] = self._repeated(lambda: run(compiler, piece, shape, *arguments), arguments)

    def _repeated(self, piece: Callable[[], Any], arguments: list[Any]) -> list[float]:
        changed = pieces.changing(tuple(arguments))
        kept = [tensor.clone() for tensor in changed]

        def undo() -> None:
            for tensor, before in zip(changed, kept, strict=True):
                tensor.copy_(before)

        def call() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            piece()

        return seconds_of_calls(call, undo, self.repeats, self.device)

    def seconds(self) -> Times:
        """Of each repeat, by part."""
        return self.times


def own(tree: TokenTree) -> TokenTree:
    """A copy of what pieces made of a tree; the rest of a chain is a constant."""
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
    return total + (weight_bytes(target.get_output_embeddings()) if borrows_head else 0)


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
    times = seconds_of_calls(lambda: destination.copy_(source), lambda: None, 20, device)
    return 2 * source.nbytes / median(times)
