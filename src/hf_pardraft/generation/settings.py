"""The settings of `drafter.generation_config` that the decode loops read, checked; a call's own config overrides them."""

import math
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from ..models.base import ParallelDrafter
from ..ngram.lookup import SMOOTHINGS
from .schedule import TunedDraft, nearest_size, read_table, still_stands, tables_in
from .tree.token_tree import END_RULES

DECODE_LOOPS = ("native", "stock")
VERIFICATIONS = ("match", "rejection")
TREE_SCORINGS = ("probability", "dart")
CHOICES = {
    "decode_loop": DECODE_LOOPS,
    "verification": VERIFICATIONS,
    "tree_scoring": TREE_SCORINGS,
    "tree_end_rule": END_RULES,
    "ngram_smoothing": tuple(SMOOTHINGS),
}
SWITCHES = {"adaptive_depth", "time_rounds", "record_drafts", "use_target_features"}
# Least and greatest. The greatest are far above any use: they keep a slip of a digit from asking for a machine's whole memory.
WHOLE_NUMBERS = {
    "tree_budget": (0, 1 << 14),
    "tree_beam_width": (1, 1 << 14),
    "tree_top_k": (1, 1 << 24),
    "ngram_first_level": (0, 1 << 14),
}
ADVICE = "set it in the drafter's generation config, or in the call's"
# Where the hook notes what a call itself asks for: transformers fills in a default that looks like a request.
REQUESTED_DEPTH = "_requested_num_assistant_tokens"
# Where the hook leaves what it has resolved for the rest of the call.
RESOLVED = "_draft_settings"


@dataclass(frozen=True)
class DraftSettings:
    """How to decode with a drafter.

    Attributes:
        depth: tokens to draft a round (`num_assistant_tokens`, by default what the drafter was trained for).
        tree_budget: nodes of the token tree besides the anchor; 0 drafts a chain.
        tree_beam_width: prefixes that are extended at each level; by default the budget, or 20 with an n-gram model.
        tree_top_k: tokens by which each is extended; by default the budget, or 25 with an n-gram model.
        tree_scoring: what a prefix is worth. "probability": its probability; "dart": DART's weights, which favour depth; by
            default "dart" with an n-gram model, else "probability".
        tree_end_rule: what a prefix that ends the text is extended by: "stop", nothing; "last", what is left when all others
            are extended (DART's code); "ignore", no difference; by default "stop" with an n-gram model, else "ignore".
        ngram_model: folder or Hub repository of an [`NgramModel`] for trees; `drafter.ngram`, a model itself, is the other way.
        ngram_weight: of the model's log-probabilities in a prefix's score; 0 does without the model; by default 0.5.
        ngram_first_level: drafted tokens that the drafter alone judges, before the model has its say: 1 as in DART's code,
            or 0 as in its paper.
        ngram_smoothing: how the model's counts become a probability; by default as the model was loaded.
        adaptive_depth: whether to draft less while little is accepted, and nothing for a while if nothing is.
        decode_loop: "native" for this package's loop, "stock" for transformers' own assisted decoding.
        verification: "match": draw the target's token, and keep a draft while it equals it. "rejection": draw the drafts
            too, and keep each with the odds of the target's law to the drafter's; chains only.
        time_rounds: whether to measure the seconds that each part of a round takes.
        record_drafts: whether to keep all that is proposed, for `drafter.last_stats`.
        use_target_features: whether a drafter that can do both reads the target's hidden states; by default it does.
        tuned_drafting: depth and tree budget by batch size, which `pardraft eval --tune` writes: `{"by_batch_size": {"8":
            {"num_assistant_tokens": 4, "tree_budget": 16}}}`; a depth of 0 leaves the text to plain `generate`. A call takes
            the entry of the size nearest to its batch, unless it asks for a depth or a budget itself, for rejection or for
            transformers' loop. Where `"instead_of"` names the drafter's own depth and budget of then, setting one of
            them later takes precedence over the table; where `"measured_on"` names a `device_type`, the table is for
            that type only. Under `"compiled"` there may be such a table for compiled rounds (`cache_implementation="static"`).
        by_batch_size: the table of `tuned_drafting` that applies to the call, if one does. Not a setting of its own.
    """

    depth: int
    tree_budget: int = 0
    tree_beam_width: int | None = None
    tree_top_k: int | None = None
    tree_scoring: str | None = None
    tree_end_rule: str | None = None
    ngram_model: str | None = None
    ngram_weight: float | None = None
    ngram_first_level: int = 1
    ngram_smoothing: str | None = None
    adaptive_depth: bool = False
    decode_loop: str = "native"
    verification: str = "match"
    time_rounds: bool = False
    record_drafts: bool = False
    use_target_features: bool | None = None
    tuned_drafting: dict[str, Any] | None = None
    by_batch_size: dict[int, TunedDraft] | None = None

    def for_batch(self, batch: int) -> "DraftSettings":
        """What a call of so many batch items takes: a `depth` of 0 says that it is faster without drafts."""
        if self.by_batch_size is None:
            return self
        tuned = self.by_batch_size[nearest_size(self.by_batch_size, batch)]
        return replace(self, depth=tuned.depth, tree_budget=tuned.tree_budget)


def settings_of_call(
    drafter: ParallelDrafter, generation_config: GenerationConfig, batch: int | None = None, device_type: str = "cpu"
) -> DraftSettings:
    """The settings that were resolved when the call began, or are now, for so many batch items; see [`read_settings`]."""
    settings = vars(generation_config).get(RESOLVED)
    if settings is None:
        settings = read_settings(drafter, generation_config, device_type)
    return settings if batch is None else settings.for_batch(batch)


def read_settings(
    drafter: ParallelDrafter, generation_config: GenerationConfig, device_type: str = "cpu"
) -> DraftSettings:
    """Resolve the settings of one call.

    Args:
        drafter: its `generation_config` holds its own settings, under the names of [`DraftSettings`] (the depth under
            `num_assistant_tokens`); a generation config keeps attributes that it doesn't know, and saves them.
        generation_config: that of the `generate` call, whose attributes of these names take precedence.
        device_type: of the target, as in `torch.device.type`.

    Raises:
        ValueError: for a value that can't be honoured.
    """
    given = {**settings_in(drafter.generation_config), **settings_in(generation_config)}
    requested_depth = vars(generation_config).get(REQUESTED_DEPTH)
    settings = DraftSettings(depth=drafter.checked_depth(requested_depth), **given)
    for name, choices in CHOICES.items():
        # Compared as texts: what a file holds may have no order and no hash.
        if name in given and not (isinstance(given[name], str) and given[name] in choices):
            raise ValueError(f"{name} must be one of {choices}, got {given[name]!r}: {ADVICE}")
    check_types(given)
    check_ngram(settings)
    if settings.tree_budget and settings.decode_loop == "stock":
        raise ValueError(
            f"transformers' own loop verifies chains only, got tree_budget={settings.tree_budget} with decode_loop='stock': "
            "set one of them back in drafter.generation_config"
        )
    if settings.verification == "rejection" and (settings.tree_budget or settings.decode_loop == "stock"):
        raise ValueError(
            "verification='rejection' works with chains in this package's loop, got "
            f"tree_budget={settings.tree_budget} and decode_loop={settings.decode_loop!r}: set verification to 'match', or "
            "tree_budget to 0 and decode_loop to 'native'"
        )
    if settings.tuned_drafting is None:
        return settings
    tables = tables_in(settings.tuned_drafting)
    choices = {is_compiled: read_table(table, drafter.max_draft_depth) for is_compiled, table in tables.items()}
    asks_itself = requested_depth is not None or vars(generation_config).get("tree_budget") is not None
    is_tunable = settings.decode_loop == "native" and settings.verification == "match"
    if asks_itself or not is_tunable:
        return settings
    # Compiled rounds do with the table of others; what pays when compiled may not pay without.
    which = wants_compiled(generation_config) and True in tables
    if which not in tables or not still_stands(tables[which], own_draft(drafter), device_type):
        return settings
    return replace(settings, by_batch_size=choices[which])


def wants_compiled(generation_config: GenerationConfig) -> bool:
    """Whether a call of `generate` asks for compiled rounds."""
    return not generation_config.disable_compile and generation_config.cache_implementation == "static"


def own_draft(drafter: ParallelDrafter) -> dict[str, int | None]:
    """A drafter's own depth and tree budget, as its generation config has them; `None` where it leaves them open."""
    attributes = vars(drafter.generation_config)
    return {name: attributes.get(name) for name in ("num_assistant_tokens", "tree_budget")}


def settings_in(generation_config: GenerationConfig) -> dict[str, Any]:
    """The draft settings among the attributes of a generation config, those that were left at `None` excepted."""
    names = DraftSettings.__dataclass_fields__.keys() - {"depth", "by_batch_size"}
    attributes = vars(generation_config)
    return {name: attributes[name] for name in names if attributes.get(name) is not None}


def check_ngram(settings: DraftSettings) -> None:
    """Raise a `ValueError` for a weight or a name of a model that can't be honoured."""
    weight, name = settings.ngram_weight, settings.ngram_model
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and math.isfinite(weight)
    if weight is not None and not (is_number and weight >= 0):
        raise ValueError(f"ngram_weight must be a number of at least 0, got {weight!r}: {ADVICE}")
    if name is not None and not isinstance(name, str):
        raise ValueError(
            f"ngram_model must be the name of a folder or a Hub repository, got {type(name).__name__}: a model itself goes "
            "to drafter.ngram"
        )


def check_types(given: dict[str, Any]) -> None:
    """Raise a `ValueError` for a setting that is not of its type, or is out of all proportion."""
    for name in SWITCHES & given.keys():
        if not isinstance(given[name], bool):
            raise ValueError(f"{name} must be True or False, got {given[name]!r}: {ADVICE}")
    for name in WHOLE_NUMBERS.keys() & given.keys():
        value, (least, most) = given[name], WHOLE_NUMBERS[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}: {ADVICE}")
