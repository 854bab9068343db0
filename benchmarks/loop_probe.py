"""Models that follow a script, and a count of what happens between their forwards; see loop_overhead.py."""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_pardraft import DFlashDrafter

# Far beyond what an untrained drafter or a small target says of its own accord.
MARGIN = 100.0
# The host waits for the result of each of these: a number it asked for, or a shape. So did multinomial in older torch.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select"}
WAITING_METHODS = ("tolist", "cpu", "numpy")


@dataclass(frozen=True)
class Script:
    """What the target writes and the drafter guesses.

    Attributes:
        text: `(length,)`.
        guesses: `(length, depth, 2)`, the first and second choice after each anchor.
        scores: `(2,)`, the logits of first and second choices.
    """

    text: torch.LongTensor
    guesses: torch.LongTensor
    scores: torch.Tensor


def prescribe(vocab_size: int, length: int, depth: int, rate: float, in_tree: bool, seed: int = 0) -> Script:
    """A random text without special tokens, and guesses; in trees, half of the wrong ones have the truth for a second choice."""
    generator = torch.Generator().manual_seed(seed)
    num_special = 3
    text = torch.randint(num_special, vocab_size, (length + depth,), generator=generator)
    truth = text.unfold(0, depth, 1)[1:]
    is_right, is_second = (torch.rand(truth.shape, generator=generator) < share for share in (rate, 0.5))
    wrong, other_wrong = ((truth - num_special + step) % (vocab_size - num_special) + num_special for step in (1, 2))
    first = torch.where(is_right, truth, wrong)
    second = torch.where(~is_right & is_second, truth, other_wrong)
    scores = torch.tensor([MARGIN, MARGIN - 1 if in_tree else 0.0])
    return Script(text, torch.stack([first, second], dim=-1), scores)


class LoopCounter(TorchDispatchMode):
    """Counts what is dispatched while `probe` sees no model at work; `sites` by how many rounds had begun."""

    def __init__(self, probe: "Probe") -> None:
        super().__init__()
        self.probe = probe
        self.sites: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.probe.inside:
            name = func.overloadpacket.__name__
            # A mask as an index is looked up with nonzero, out of sight.
            indices = args[1] if name in ("index", "index_put_") else ()
            waits = name in WAITS or any(index is not None and index.dtype == torch.bool for index in indices)
            # torch.tensor makes a tensor, and all that is seen of it is this view.
            is_view = func.is_view and name != "lift_fresh"
            self.probe.waits += waits
            self.probe.uploads += name == "lift_fresh" and args[0].ndim > 0
            self.probe.views += is_view
            self.probe.ops += not is_view and name != "_local_scalar_dense"
            self._note(f"{'view' if is_view else 'op'} {name}")
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.originals = {name: getattr(torch.Tensor, name) for name in WAITING_METHODS}
        for name, original in self.originals.items():
            setattr(torch.Tensor, name, self._noted(name, original))
        return super().__enter__()

    def __exit__(self, *exception):
        for name, original in self.originals.items():
            setattr(torch.Tensor, name, original)
        return super().__exit__(*exception)

    def _note(self, what: str) -> None:
        self.sites[len(self.probe.marks)][f"{what} {call_site()}"] += 1

    def _noted(self, name, original):
        def method(tensor, *args, **kwargs):
            if not self.probe.inside:
                self.probe.waits += 1
                self._note(f"wait {name}")
            return original(tensor, *args, **kwargs)

        return method


def call_site() -> str:
    """The innermost caller outside torch and this file, as `folder/file.py:line function`."""
    frame = sys._getframe(1)
    while frame.f_back and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"


@dataclass(frozen=True)
class Mark:
    """Where things stood when the target's forward of a round began."""

    seconds: float
    ops: int
    views: int
    waits: int
    uploads: int
    num_cached: int


@dataclass(frozen=True)
class Call:
    """A module's call, and how much its cache held at the time."""

    module: torch.nn.Module
    args: tuple
    kwargs: dict
    num_cached: int

    def rewind(self) -> None:
        """Make the cache what it was before the call; entries of committed tokens never change."""
        cache = self.kwargs.get("past_key_values")
        if cache is not None:
            cache.crop(self.num_cached - cache.get_seq_length())


class Probe:
    """Hooks on the models: they follow the script, say when they are at work, and leave a mark every round.

    Args:
        target, drafter: of the runs that follow.
        clock: seconds.
    """

    def __init__(self, target: PreTrainedModel, drafter: DFlashDrafter, clock: Callable[[], float]) -> None:
        self.target, self.drafter, self.clock = target, drafter, clock
        self.inside = 0
        self.capture_at = -1
        self.calls: dict[str, Call] = {}
        self.marks: list[Mark] = []
        self.ops = self.views = self.waits = self.uploads = 0
        self.modules = {
            "embedding": target.get_input_embeddings(),
            "drafter": drafter,
            "head": target.get_output_embeddings(),
            "target": target,
        }
        after = {"head": self._after_head, "target": self._after_target}
        for name, module in self.modules.items():
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            module.register_forward_hook(self._after(after.get(name)), with_kwargs=True)

    def start(self, script: Script, capture_at: int = -1) -> None:
        """Forget the last run, and note the calls of round `capture_at` of the next one."""
        self.script, self.capture_at = script, capture_at
        self.marks = []
        self.ops = self.views = self.waits = self.uploads = 0

    def _before(self, name: str):
        def hook(module, args, kwargs):
            cache = kwargs.get("past_key_values")
            if not self.inside and len(self.marks) == self.capture_at:
                self.calls[name] = Call(module, args, kwargs, 0 if cache is None else cache.get_seq_length())
            if name == "target":
                counts = (self.ops, self.views, self.waits, self.uploads)
                self.marks.append(Mark(self.clock(), *counts, cache.get_seq_length()))
            self.inside += 1
            if name == "drafter":
                self.anchor = kwargs["position_ids"][0, -module.config.block_size, None]

        return hook

    def _after(self, change):
        def hook(module, args, kwargs, output):
            if change is not None:
                change(kwargs, output)
            self.inside -= 1

        return hook

    def _after_head(self, kwargs, logits: torch.Tensor) -> None:
        """Where the head reads a draft, `(1, depth, vocab)`, let the oracle speak."""
        if self.inside == 1:
            guesses = self.script.guesses.index_select(0, self.anchor)[:, : logits.shape[1]]
            logits.mul_(1 / MARGIN).scatter_(2, guesses, self.script.scores.expand(guesses.shape))

    def _after_target(self, kwargs, outputs) -> None:
        """Make the target, `(1, slots, vocab)`, sure of the next token of the text at each position."""
        positions = kwargs["position_ids"][0, -outputs.logits.shape[1] :]
        following = self.script.text[1:].index_select(0, positions).view(1, -1, 1)
        outputs.logits.scatter_(2, following, MARGIN, reduce="add")
