"""The settings of `drafter.generation_config` that the decode loops read, checked."""

from dataclasses import dataclass

from transformers import GenerationConfig

DECODE_LOOPS = ("native", "stock")
VERIFICATIONS = ("match",)


@dataclass(frozen=True)
class DraftSettings:
    """How to decode with a drafter.

    Attributes:
        decode_loop: "native" for this package's loop, "stock" for transformers' own assisted decoding.
        verification: "match": draw the target's token, and keep a draft while it equals it.
        time_rounds: whether to measure the seconds that each part of a round takes.
    """

    decode_loop: str = "native"
    verification: str = "match"
    time_rounds: bool = False


def read_settings(generation_config: GenerationConfig) -> DraftSettings:
    """The draft settings among the attributes of a generation config (it keeps the ones that it doesn't know).

    Raises:
        ValueError: for a value that this version can't honour.
    """
    given = generation_config.to_dict()
    settings = DraftSettings(
        decode_loop=given.get("decode_loop") or "native",
        verification=given.get("verification") or "match",
        time_rounds=bool(given.get("time_rounds")),
    )
    if settings.decode_loop not in DECODE_LOOPS:
        raise ValueError(f"decode_loop must be one of {DECODE_LOOPS}, got {settings.decode_loop!r}")
    if settings.verification not in VERIFICATIONS:
        raise ValueError(f"verification must be one of {VERIFICATIONS}, got {settings.verification!r}")
    if given.get("tree_budget"):
        raise ValueError(f"this version drafts chains: tree_budget must be 0, got {given['tree_budget']}")
    return settings
