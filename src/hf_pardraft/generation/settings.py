"""The settings of `drafter.generation_config` that the decode loops read, checked; a call's own config overrides them."""

from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig

from ..checkpoints.config_checks import is_number, is_whole
from ..models.base import ParallelDrafter
from ..ngram.lookup import SMOOTHINGS
from .scheduling.plans import MOST_NODES
from .tree.token_tree import END_RULES

DECODE_LOOPS = ("native", "stock")
VERIFICATIONS = ("match", "rejection")
DRAFT_SCHEDULES = ("auto", "fixed")
# What a drafter gets that says nothing; the text is looked up where the schedule chooses among trees and chains.
DEFAULT_SCHEDULE = "auto"
DEFAULT_LOOKUP = 10
TREE_SCORINGS = ("probability", "dart")
CHOICES = {
    "decode_loop": DECODE_LOOPS,
    "verification": VERIFICATIONS,
    "draft_schedule": DRAFT_SCHEDULES,
    "tree_scoring": TREE_SCORINGS,
    "tree_end_rule": END_RULES,
    "ngram_smoothing": tuple(SMOOTHINGS),
}
SWITCHES = {"time_rounds", "record_drafts", "pack_weights", "use_target_features"}
# Least and greatest. The greatest are far above any use: they keep a slip of a digit from asking for a machine's whole memory.
WHOLE_NUMBERS = {
    "tree_budget": (0, 1 << 14),
    "tree_beam_width": (1, 1 << 14),
    "tree_top_k": (1, 1 << 24),
    "ngram_first_level": (0, 1 << 14),
    "prompt_lookup_num_tokens": (0, 1 << 10),
    "max_matching_ngram_size": (1, 1 << 6),
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
        depth: tokens to draft a round (`num_assistant_tokens`, by default what the drafter was trained for), with a schedule of
            "auto" at most.
        tree_budget: nodes of the token tree besides the anchor, with a schedule of "auto" at most; 0 drafts chains.
        may_do_without_trees: whether nobody asked for trees, so that a target which takes none gets chains. Not a setting of its
            own.
        draft_schedule: "auto": the most tokens per second, by what rounds have cost and what was accepted. How many tokens a
            round drafts and verifies, if any, then depends on the clock; the text does not. "fixed": the same in every round, as
            in transformers' own loop and with "rejection" always.
        tree_beam_width: prefixes that are extended at each level; by default the budget, or 20 with an n-gram model.
        tree_top_k: tokens by which each is extended; by default the budget, or 25 with an n-gram model.
        tree_scoring: what a prefix is worth. "probability": its probability; "dart": DART's weights, which favour depth; by
            default "probability" for sampled calls without an n-gram model, else "dart".
        tree_end_rule: what a prefix that ends the text is extended by: "stop", nothing; "last", what is left when all others
            are extended (DART's code); "ignore", no difference; by default "stop" with an n-gram model, else "ignore".
        prompt_lookup_num_tokens: how deep into a tree, beside the drafter's tokens, those may go that came next where the text's
            last ones, or a drafted prefix, stood before (prompt lookup); by default 10 with a schedule of "auto", else 0.
            Trees only, and no compiled ones on an accelerator.
        max_matching_ngram_size: how many last tokens are looked up, at most; by default 4.
        ngram_model: folder or Hub repository of an [`NgramModel`] for trees; `drafter.ngram`, a model itself, is the other way.
        ngram_weight: of the model's log-probabilities in a prefix's score; 0 does without the model; by default 0.5.
        ngram_first_level: drafted tokens that the drafter alone judges, before the model has its say: 1 as in DART's code,
            or 0 as in its paper.
        ngram_smoothing: how the model's counts become a probability; by default as the model was loaded.
        decode_loop: "native" for this package's loop, "stock" for transformers' own assisted decoding.
        verification: "match": draw the target's token, and keep a draft while it equals it. "rejection": draw the drafts
            too, and keep each with the odds of the target's law to the drafter's; chains only.
        time_rounds: whether to measure the seconds that each part of a round takes.
        record_drafts: whether to keep all that is proposed, for `drafter.last_stats`.
        pack_weights: whether rounds on a CPU multiply by a packed copy of each weight, which takes as much memory again.
        use_target_features: whether a drafter that can do both reads the target's hidden states; by default it does.
    """

    depth: int
    tree_budget: int = 0
    may_do_without_trees: bool = False
    draft_schedule: str = "fixed"
    tree_beam_width: int | None = None
    tree_top_k: int | None = None
    tree_scoring: str | None = None
    tree_end_rule: str | None = None
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    ngram_model: str | None = None
    ngram_weight: float | None = None
    ngram_first_level: int = 1
    ngram_smoothing: str | None = None
    decode_loop: str = "native"
    verification: str = "match"
    time_rounds: bool = False
    record_drafts: bool = False
    pack_weights: bool = True
    use_target_features: bool | None = None

    @property
    def is_automatic(self) -> bool:
        return self.draft_schedule == "auto"


# What attributes of a generation config are called that are settings: all but what is found out, or has a name of transformers'.
SETTING_NAMES = DraftSettings.__dataclass_fields__.keys() - {"depth", "may_do_without_trees"}


def settings_of_call(drafter: ParallelDrafter, generation_config: GenerationConfig) -> DraftSettings:
    """The settings that were resolved when the call began, or are now; see [`read_settings`]."""
    settings = vars(generation_config).get(RESOLVED)
    return read_settings(drafter, generation_config) if settings is None else settings


def read_settings(drafter: ParallelDrafter, generation_config: GenerationConfig) -> DraftSettings:
    """Resolve the settings of one call.

    Args:
        drafter: its `generation_config` holds its own settings, under the names of [`DraftSettings`] (the depth under
            `num_assistant_tokens`); a generation config keeps attributes that it doesn't know, and saves them.
        generation_config: that of the `generate` call, whose attributes of these names take precedence.

    Raises:
        ValueError: for a value that can't be honoured.
    """
    own, call = settings_in(drafter.generation_config), settings_in(generation_config)
    given = {**own, **call}
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
    return with_schedule(settings, own, call, requested_depth is not None)


def with_schedule(
    settings: DraftSettings, own: dict[str, Any], call: dict[str, Any], asks_for_depth: bool
) -> DraftSettings:
    """The settings with the schedule that the call asks for, or else the drafter; and trees, where the schedule may choose.

    Args:
        settings: with those of both.
        own, call: what the drafter's generation config says, and the call's.
        asks_for_depth: whether the call does.
    """
    asks_itself = asks_for_depth or "tree_budget" in call
    default = "fixed" if asks_itself else own.get("draft_schedule", DEFAULT_SCHEDULE)
    schedule = call.get("draft_schedule", default)
    if schedule == "fixed" or settings.decode_loop == "stock" or settings.verification == "rejection":
        return replace(settings, draft_schedule="fixed")
    lookup = settings.prompt_lookup_num_tokens
    asks_for_trees = "tree_budget" in {**own, **call}
    return replace(
        settings,
        draft_schedule="auto",
        prompt_lookup_num_tokens=DEFAULT_LOOKUP if lookup is None else lookup,
        tree_budget=settings.tree_budget if asks_for_trees else MOST_NODES,
        may_do_without_trees=not asks_for_trees,
    )


def wants_compiled(generation_config: GenerationConfig) -> bool:
    """Whether a call of `generate` asks for compiled rounds."""
    return not generation_config.disable_compile and generation_config.cache_implementation == "static"


def returns_states(generation_config: GenerationConfig) -> bool:
    """Whether a call of `generate` returns hidden states or attentions."""
    wanted = generation_config.output_hidden_states or generation_config.output_attentions
    return bool(generation_config.return_dict_in_generate and wanted)


def settings_in(generation_config: GenerationConfig) -> dict[str, Any]:
    """The draft settings among the attributes of a generation config, those that were left at `None` excepted."""
    attributes = vars(generation_config)
    return {name: attributes[name] for name in SETTING_NAMES & attributes.keys() if attributes[name] is not None}


def check_ngram(settings: DraftSettings) -> None:
    """Raise a `ValueError` for a weight or a name of a model that can't be honoured."""
    weight, name = settings.ngram_weight, settings.ngram_model
    if weight is not None and not (is_number(weight) and weight >= 0):
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
        if not is_whole(value) or not least <= value <= most:
            raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}: {ADVICE}")
