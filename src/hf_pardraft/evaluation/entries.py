"""What takes part in an evaluation: plain `generate`, drafters in every setting, and transformers' own ways."""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from transformers import PreTrainedModel

from ..generation.settings import DEFAULT_LOOKUP
from ..models.base import ParallelDrafter

# The same in hub/results.py, which reads what evaluation writes, and imports nothing of it.
PLAIN = "plain"
# What the shorter names on the command line are called in a generation config.
SHOWN_AS = {"num_assistant_tokens": "depth", "tree_budget": "tree"}
STOCK_KINDS = ("dflash", "dflare")
# What transformers compiles by: a cache whose shape stays the same.
COMPILED = {"cache_implementation": "static"}


@dataclass(frozen=True)
class Entry:
    """One way to decode.

    Attributes:
        name: of its result rows.
        assistant: a drafter, or a small language model; `None` for `generate` by itself.
        setting: attributes of the call's `GenerationConfig` that make it what it is.
        arguments: of the `generate` call itself.
    """

    name: str
    assistant: PreTrainedModel | None = None
    setting: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether every forward of the target commits one token."""
        return self.assistant is None and "prompt_lookup_num_tokens" not in self.setting

    @property
    def is_parallel(self) -> bool:
        """Whether a drafter of this package drafts in one of its own ways, and so tells how its rounds went."""
        return isinstance(self.assistant, ParallelDrafter) and "speculation_type" not in self.setting

    @property
    def one_at_a_time(self) -> bool:
        """Whether it needs transformers' assisted loop, which takes one text at a time."""
        return not self.is_plain and (not self.is_parallel or self.decode_loop == "stock")

    @property
    def decode_loop(self) -> str:
        """The loop that a drafter of this package runs in."""
        own = vars(self.assistant.generation_config).get("decode_loop") or "native"
        return self.setting.get("decode_loop", own)


def settings_grid(choices: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination of the choices; one empty setting if there is nothing to choose."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def name_of(name: str, setting: dict[str, Any], varied: set[str]) -> str:
    """What a result row is called: the drafter, and those of its settings that differ from one to another."""
    return ", ".join([name, *(shown(key, value) for key, value in setting.items() if key in varied)])


def shown(key: str, value: Any) -> str:
    """One setting, for people."""
    if key == "tree_budget" and value == 0:
        return "chain"
    return f"{SHOWN_AS.get(key, key)} {value}"


def drafter_entries(drafters: dict[str, ParallelDrafter], choices: dict[str, list[Any]]) -> list[Entry]:
    """Every drafter in every setting.

    Args:
        drafters: by name.
        choices: the values to try of each setting, by its name in a generation config.
    """
    varied = {key for key, values in choices.items() if len(values) > 1}
    return [
        Entry(name_of(name, setting, varied), drafter, setting)
        for name, drafter in drafters.items()
        for setting in settings_grid(choices)
    ]


def with_compiled(entries: list[Entry]) -> list[Entry]:
    """Entries, and after each one that can be compiled its compiled twin; transformers' assisted loops can't."""
    return [twin for entry in entries for twin in [entry, *([] if entry.one_at_a_time else [compiled_twin(entry)])]]


def compiled_twin(entry: Entry) -> Entry:
    return replace(entry, name=f"{entry.name}, compiled", setting={**entry.setting, **COMPILED})


def plain_entry() -> Entry:
    return Entry(PLAIN)


def prompt_lookup_entry() -> Entry:
    """transformers' prompt lookup: drafts are what once followed the last tokens."""
    return Entry("prompt lookup", setting={"prompt_lookup_num_tokens": DEFAULT_LOOKUP})


def assisted_entry(name: str, assistant: PreTrainedModel, tokenizers: dict[str, Any]) -> Entry:
    """transformers' assisted decoding with a small language model; `tokenizers` if the vocabularies differ."""
    return Entry(f"assisted, {name}", assistant, arguments=tokenizers)


def stock_dflash_entries(drafters: dict[str, ParallelDrafter]) -> list[Entry]:
    """transformers' own DFlash loop with each drafter that it can run.

    Raises:
        ValueError: if there is none.
    """
    entries = [
        Entry(f"{name}, stock DFlash loop", drafter, {"speculation_type": "dflash"})
        for name, drafter in drafters.items()
        if drafter.config.drafter_kind in STOCK_KINDS
    ]
    if not entries:
        raise ValueError(
            "the baseline stock_dflash needs a DFlash or DFlare drafter among --drafter, got "
            f"{', '.join(drafter.config.drafter_kind for drafter in drafters.values())}"
        )
    return entries
