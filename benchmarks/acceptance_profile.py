"""How often a simulated drafter is right, from one number, a list by position, or the tau to hit."""

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hf_pardraft.user_input.files import quoted, read_text

TAU_PREFIX = "tau="


@dataclass(frozen=True)
class AcceptanceProfile:
    """One of three is given.

    Attributes:
        rate: the probability that a drafted token is accepted if all before it are.
        by_position: the share of rounds that accept the first, second, ... drafted token, as measured rows say it; so it
            never rises.
        tau: mean tokens that a round is to commit, the bonus token counted.
    """

    rate: float | None = None
    by_position: tuple[float, ...] | None = None
    tau: float | None = None

    def __str__(self) -> str:
        """As it is typed, for what is published: numbers, not the name of their file."""
        if self.tau is not None:
            return f"{TAU_PREFIX}{self.tau:g}"
        return " ".join(f"{share:g}" for share in self.by_position or (self.rate,))

    def rates(self, depth: int) -> list[float]:
        """For each of `depth` positions, the probability of being right given that all before it are.

        Raises:
            ValueError: if the profile says nothing about so deep a draft, or no such draft has that tau.
        """
        if self.rate is not None:
            return [self.rate] * depth
        if self.tau is not None:
            return [rate_for_tau(self.tau, depth)] * depth
        if len(self.by_position) < depth:
            raise ValueError(
                f"the acceptance profile has {len(self.by_position)} positions, and {depth} tokens are drafted: give as many, "
                "or set --depth"
            )
        before = (1.0, *self.by_position)
        return [now / last if last else 0.0 for last, now in zip(before, self.by_position[:depth], strict=False)]


def read_profile(values: list[str]) -> AcceptanceProfile:
    """Understand `--simulate-acceptance`: one number, several (with or without commas), a file of them, or `tau=` and a number.

    Raises:
        OSError: if the file can't be read.
        ValueError: if it is none of these, a share is not between 0 and 1, or shares rise.
    """
    if len(values) == 1 and Path(values[0]).is_file():
        values = [read_text(values[0]).strip().removeprefix("[").removesuffix("]")]
    # A JSON list, lines and columns are all numbers with something between them.
    values = [part for value in values for part in re.split(r"[\s,;]+", value) if part]
    if len(values) == 1 and values[0].startswith(TAU_PREFIX):
        tau = read_number(values[0].removeprefix(TAU_PREFIX))
        if not 1 <= tau < float("inf"):
            raise ValueError(f"every round commits at least one token, got a tau of {tau}: expected 1 or more")
        return AcceptanceProfile(tau=tau)
    shares = tuple(read_number(value) for value in values)
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"expected shares between 0 and 1, or tau= and a number, got {quoted(' '.join(values))}")
    if any(later > earlier for earlier, later in pairwise(shares)):
        raise ValueError(
            f"the share of rounds that accept a position can't rise from one to the next, since all before it have to be "
            f"accepted, too: got {quoted(' '.join(values))}"
        )
    return AcceptanceProfile(rate=shares[0]) if len(shares) == 1 else AcceptanceProfile(by_position=shares)


def read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"expected a number, got {quoted(text)}") from error


def expected_tau(rates: list[float]) -> float:
    """Mean tokens of a round whose positions are right with these probabilities, given those before them."""
    tau, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        tau += reached
    return tau


def rate_for_tau(tau: float, depth: int) -> float:
    """The one rate for all positions that gives `tau`.

    Raises:
        ValueError: if not even right drafts do.
    """
    if tau > depth + 1:
        raise ValueError(
            f"drafts of {depth} tokens have a tau of at most {depth + 1}, got {tau}: set --depth, or ask for less"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tau([middle] * depth) < tau else (low, middle)
    return high
