"""What decode.py measures: targets with their drafters and prompts, real ones and simulated ones."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from acceptance_profile import AcceptanceProfile
from hf_pardraft import AutoDrafter, DFlashDrafter
from hf_pardraft.demo.family import SHIPPED_FAMILY, load_family
from hf_pardraft.demo.prompts import built_in_prompts
from hf_pardraft.evaluation.encoding import random_prompts
from hf_pardraft.evaluation.entries import Entry
from hf_pardraft.evaluation.models import chosen_device
from hf_pardraft.models.base import ParallelDrafter
from loop_overhead import DEPTH, random_target
from simulation import Simulation, depth_of, fair_simulation, write_script
from true_shapes import CONFIGS, PUBLISHED, random_model, true_drafter

TRAINED = ("PARD", "DFlash", "DFlare", "DART")
RANDOM_PROMPT = 128
STORY_TOKENS = 16


@dataclass(frozen=True)
class Pair:
    """A drafter of a case.

    Attributes:
        drafter: to draft with.
        tree: settings of its trees.
        setting: of all that it does.
        profile: how often it is said to be right; `None` for a trained drafter, which shows it.
        runner_up: the share of wrong drafts whose second choice is said to be right.
        source: where the profile is from.
        paper_speedup: what the paper says of the speed.
    """

    drafter: ParallelDrafter
    tree: dict[str, Any]
    setting: dict[str, Any] = field(default_factory=dict)
    profile: AcceptanceProfile | None = None
    runner_up: float = 0.0
    source: str | None = None
    paper_speedup: str | None = None


class Case:
    """A target, its drafters by name, and the prompts that are continued, `(1, length)` each.

    Args:
        target, pairs, prompts: these.
        max_new_tokens: to write.
    """

    def __init__(
        self, target: PreTrainedModel, pairs: dict[str, Pair], prompts: list[torch.LongTensor], max_new_tokens: int
    ) -> None:
        self.target, self.pairs, self.prompts, self.max_new_tokens = target, pairs, prompts, max_new_tokens
        self.simulated = any(pair.profile is not None for pair in pairs.values())
        self.simulations = self._simulations() if self.simulated else {}

    def _simulations(self) -> dict[int, Simulation]:
        """One for each drafter, all of the same script, which the target writes whoever drafts."""
        depths = {name: depth_of(Entry(name, pair.drafter, pair.setting)) for name, pair in self.pairs.items()}
        first = max(prompt.shape[1] for prompt in self.prompts)
        last = first + self.max_new_tokens
        length = last + 2 * max(depths.values()) + 4
        script = write_script(self.target.config.vocab_size, length, ends_of(self.target))
        return {
            id(pair.drafter): fair_simulation(
                self.target, script, pair.profile, pair.runner_up, first, last, depths[name]
            )
            for name, pair in self.pairs.items()
        }

    def around(self, entry: Entry) -> AbstractContextManager[None]:
        """The context that an entry's calls run in."""
        if not self.simulated:
            return nullcontext()
        simulation = self.simulations.get(id(entry.assistant)) or next(iter(self.simulations.values()))
        return simulation.during(entry)

    def prompts_for(self, batch_size: int) -> list[torch.LongTensor]:
        """All prompts one by one (simulated ones are all alike, so one will do), or one batch, in which they may come again."""
        if batch_size == 1:
            return self.prompts[:1] if self.simulated else self.prompts
        return [self.prompts[index % len(self.prompts)] for index in range(batch_size)]


def ends_of(target: PreTrainedModel) -> set[int]:
    """Tokens that begin, end or pad texts."""
    ids = (target.config.bos_token_id, target.config.eos_token_id, target.config.pad_token_id)
    return {token for value in ids if value is not None for token in (value if isinstance(value, list) else [value])}


def is_wanted(drafter: str, arguments: Namespace) -> bool:
    return arguments.only is None or drafter in arguments.only


def stories_case(arguments: Namespace) -> Case:
    """stories260K and the drafters that benchmarks/stories260k.py trained."""
    # It needs datasets, which nothing else here does.
    from stories260k import story_beginnings

    if not (arguments.stories and arguments.drafters and arguments.prompt_text):
        raise SystemExit("stories260k needs --stories, --drafters and --prompt-text; or leave it out with --targets")
    tokenizer = AutoTokenizer.from_pretrained(arguments.stories)
    device = chosen_device("auto")
    target = AutoModelForCausalLM.from_pretrained(arguments.stories, dtype=torch.float32).to(device).eval()
    pairs = {
        name: Pair(AutoDrafter.from_pretrained(arguments.drafters / name).to(device).eval(), {"tree_budget": 16})
        for name in TRAINED
        if (arguments.drafters / name / "config.json").exists() and is_wanted(name, arguments)
    }
    prompts = story_beginnings(arguments.prompt_text, tokenizer, arguments.prompts, STORY_TOKENS).split(1)
    return Case(target, pairs, list(prompts), arguments.max_new_tokens or 200)


def demo_case(arguments: Namespace) -> Case:
    """The family that the package brings along."""
    # Tensors this small only wait for a second thread.
    torch.set_num_threads(1)
    family = load_family(SHIPPED_FAMILY)
    device = chosen_device("auto")
    pairs = {
        name: Pair(drafter.to(device).eval(), {"tree_budget": 16})
        for name, drafter in family.drafters.items()
        if is_wanted(name, arguments)
    }
    texts = built_in_prompts()[: arguments.prompts]
    # Of one length: plain generate with a static cache is compiled anew for each.
    ids = [family.tokenizer(text)["input_ids"] for text in texts]
    prompts = list(torch.tensor([each[: min(map(len, ids))] for each in ids]).split(1))
    return Case(family.target.to(device).eval(), pairs, prompts, arguments.max_new_tokens or 160)


def random_case(arguments: Namespace) -> Case:
    """100 million random weights, and a drafter of two layers that is said to be right at a rate of 0.8."""
    target = random_target(arguments.quick).to(chosen_device("auto"))
    num_layers = 1 if arguments.quick else 2
    drafter = DFlashDrafter.for_target(target, num_layers=num_layers, block_size=DEPTH + 1, mask_token_id=0)
    rate = AcceptanceProfile(rate=0.8)
    source = "no paper: each position is right at a rate of 0.8, and half of the wrong ones have a right second choice"
    pair = Pair(drafter, {"tree_budget": 16 if arguments.quick else 60}, {}, rate, 0.5, source)
    return Case(target, {"DFlash": pair}, prompts_of(target, arguments), arguments.max_new_tokens or 128)


def true_case(name: str) -> Callable[[Namespace], Case]:
    """A target at its true shape in bfloat16, with random weights."""

    def make(arguments: Namespace) -> Case:
        target = random_model(CONFIGS[name](), chosen_device("auto"), torch.bfloat16)
        pairs = {}
        for (target_name, drafter_name), published in PUBLISHED.items():
            if target_name == name and is_wanted(drafter_name, arguments):
                pairs[drafter_name] = Pair(
                    true_drafter(drafter_name, target),
                    published.tree or {"tree_budget": 60},
                    {"num_assistant_tokens": published.depth},
                    published.profile,
                    0.0,
                    published.source,
                    published.speedup,
                )
        return Case(target, pairs, prompts_of(target, arguments), arguments.max_new_tokens or 256)

    return make


def prompts_of(target: PreTrainedModel, arguments: Namespace) -> list[torch.LongTensor]:
    """Random tokens: as many prompts as the largest batch has items."""
    length = 8 if arguments.quick else RANDOM_PROMPT
    return random_prompts(max(arguments.batch_sizes), length, target.config.vocab_size, ends_of(target))


CASES: dict[str, Callable[[Namespace], Case]] = {
    "stories260k": stories_case,
    "demo": demo_case,
    "random100m": random_case,
    **{name: true_case(name) for name in CONFIGS},
}


def default_targets(arguments: Namespace) -> Iterator[str]:
    """What there is to measure here: true shapes need an accelerator."""
    if arguments.stories:
        yield "stories260k"
    yield "demo"
    yield "random100m"
    if torch.cuda.is_available():
        yield from CONFIGS
