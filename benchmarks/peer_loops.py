"""The published loops of z-lab (DFlash), DDTree, AMD (PARD) and DART, started with the demo family's weights; see peers.py.

Nothing of theirs is here: their modules are imported from checkouts. What is mended is what would not start with a current
transformers on a CPU, and each mend says what it stands in for. None of them adds work to a round.
"""

import copy
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import StaticCache, StaticLayer

from hf_pardraft.checkpoints.convert import convert
from hf_pardraft.demo.family import SHIPPED_FAMILY, Family

# What PARD's loop keeps free at the end of its static caches.
PARD_MARGIN = 32


@dataclass(frozen=True)
class PeerLoop:
    """A published loop, ready to write.

    Attributes:
        layer: the first layer of its target, which each forward runs through once.
        write: from token ids `(1, length)` to those of prompt and text, `(1, length + new)`, perhaps too many.
    """

    layer: nn.Module
    write: Callable[[torch.LongTensor], torch.LongTensor]


@dataclass(frozen=True)
class Task:
    """What all loops are given.

    Attributes:
        family: the target and its drafters.
        prompts: token ids, `(1, length)` each.
        max_new_tokens: to write.
        work: folder for drafters in the peers' layouts.
    """

    family: Family
    prompts: list[torch.LongTensor]
    max_new_tokens: int
    work: Path

    @property
    def end_of_text(self) -> int:
        return self.family.target.generation_config.eos_token_id

    @property
    def longest(self) -> int:
        return max(prompt.shape[1] for prompt in self.prompts) + self.max_new_tokens

    def own_target(self) -> PreTrainedModel:
        """A target that no other loop touches."""
        return copy.deepcopy(self.family.target)

    def converted(self, kind: str, layout: str) -> Path:
        """A drafter of the family in a peer's layout."""
        folder = self.work / kind
        convert(SHIPPED_FAMILY / kind, folder, layout, overwrite=True)
        return folder


class Silent:
    """Stands in for loguru's logger, which need not be installed, and whose lines would cost a loop time."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: None


def stand_in(name: str, **attributes: Any) -> ModuleType:
    """A module that holds these."""
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


class CroppableCache(DynamicCache):
    """A cache cropped to a length, as transformers 4 did; now `crop` takes how many tokens go."""

    def crop(self, length: int) -> None:
        super().crop(min(0, length - self.get_seq_length()))


@contextmanager
def importing_from(folder: Path, stand_ins: dict[str, ModuleType]) -> Iterator[None]:
    """A context whose imports find a checkout's modules and stand-ins first, and leave none of their names behind."""
    before = dict(sys.modules)
    sys.path.insert(0, str(folder))
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        own = [name for name, module in sys.modules.items() if is_in(folder, module) or name in stand_ins]
        for name in own:
            del sys.modules[name]
        sys.modules.update({name: before[name] for name in own if name in before})


def is_in(folder: Path, module: ModuleType) -> bool:
    file = vars(module).get("__file__")
    return file is not None and Path(file).is_relative_to(folder)


def read_dflash(model_class: type[PreTrainedModel], task: Task) -> PreTrainedModel:
    """The family's DFlash drafter as a model of a peer's class."""
    return model_class.from_pretrained(task.converted("dflash", "zlab"), dtype=torch.float32).eval()


def zlab_loop(folder: Path, task: Task) -> PeerLoop:
    """z-lab's DFlash loop, with a cache that can be cropped."""
    with importing_from(folder, {}):
        module = importlib.import_module("dflash.model")
    module.DynamicCache = CroppableCache
    drafter, target = read_dflash(module.DFlashDraftModel, task), task.own_target()

    def write(prompt: torch.LongTensor) -> torch.LongTensor:
        return module.dflash_generate(drafter, target, prompt, task.max_new_tokens, [task.end_of_text], 0.0)

    return PeerLoop(target.model.layers[0], write)


def ddtree_loops(folder: Path, task: Task, budgets: tuple[int, ...]) -> dict[int, PeerLoop]:
    """DDTree's loop for each number of nodes: croppable caches, a clock that waits for no GPU, and its C++ compaction."""
    with importing_from(folder, {"loguru": stand_in("loguru", logger=Silent())}):
        module = importlib.import_module("ddtree")
    module.DynamicCache = CroppableCache
    module.cuda_time = time.perf_counter
    module.maybe_enable_cpp_compact(True)
    if module.load_cpp_compact_module() is None:
        raise RuntimeError("DDTree's C++ did not build: it needs a compiler and ninja")
    drafter, target = read_dflash(module.DFlashDraftModel, task), task.own_target()

    def loop(budget: int) -> PeerLoop:
        def write(prompt: torch.LongTensor) -> torch.LongTensor:
            return module.ddtree_generate(
                drafter,
                target,
                prompt,
                drafter.mask_token_id,
                task.max_new_tokens,
                drafter.block_size,
                [task.end_of_text],
                tree_budget=budget,
            ).output_ids

        return PeerLoop(target.model.layers[0], write)

    return {budget: loop(budget) for budget in budgets}


class PlacedLayer(StaticLayer):
    """A static layer that writes where its cache says, as in transformers 4; it has no count of its own to bring forward."""

    def __init__(self, cache: "PlacedCache", length: int) -> None:
        super().__init__(length)
        self.cache = cache

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **options: Any):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self.cache.places, key_states)
        self.values.index_copy_(2, self.cache.places, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.cache.start


class PlacedCache(StaticCache):
    """A static cache whose entries go to `places`, `(tokens,)`, from `start` on."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        super().__init__(config=model.config, max_cache_len=length)
        self.places, self.start = torch.arange(0), 0
        self.layers = [PlacedLayer(self, length) for _ in self.layers]


def with_places(model: PreTrainedModel) -> PreTrainedModel:
    """A model that takes `cache_position`, as in transformers 4, by both names under which PARD's loop calls it."""
    forward = model.forward

    def placed(
        cache_position: torch.LongTensor, position_ids: None, past_key_values: PlacedCache, **arguments: Any
    ) -> Any:
        past_key_values.places, past_key_values.start = cache_position, int(cache_position[0])
        return forward(position_ids=cache_position[None], past_key_values=past_key_values, **arguments)

    model.forward = model.forward_gen = placed
    return model


class Notebook:
    """Stands in for a tokenizer: it keeps the text, which PARD's loop returns to nobody."""

    def __init__(self, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, tokens: torch.LongTensor) -> str:
        self.tokens = tokens
        return ""


def pard_loop(folder: Path, task: Task, attention: str) -> PeerLoop:
    """AMD's PARD loop, not compiled: prompts that are token ids, no GPU to wait for, and cache positions."""
    with importing_from(folder / "pard", {"loguru": stand_in("loguru", logger=Silent())}):
        importlib.import_module("torch._inductor.config")
        module = importlib.import_module("pard_infer")
    # Which kernels its attention may use on a GPU.
    torch.backends.cuda.sdp_kernel = lambda **flags: nullcontext()
    depth = task.family.drafters["PARD"].generation_config.num_assistant_tokens
    length = task.longest + PARD_MARGIN
    infer = module.PardInfer(
        depth, task.max_new_tokens, str(SHIPPED_FAMILY / "pard"), "qwen", "", para=True, nc=True, max_cache_len=length
    )
    infer.speed_logger = lambda name=None, log=True: time.time()
    infer.get_input = lambda prompt, tokenizer, prompt_type: ("", prompt)
    target, drafter = (
        with_places(
            AutoModelForCausalLM.from_pretrained(
                SHIPPED_FAMILY / name, dtype=torch.float32, attn_implementation=attention
            ).eval()
        )
        for name in ("target", "pard")
    )
    caches = PlacedCache(target, length), PlacedCache(drafter, length)

    def write(prompt: torch.LongTensor) -> torch.LongTensor:
        notebook = Notebook(task.end_of_text)
        infer.generate([prompt], target, drafter, *caches, notebook)
        return notebook.tokens[None]

    return PeerLoop(target.model.layers[0], write)
