"""What a drafter learns: weighted sums of objectives, by name."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .sums import (
    FIRST_ERROR_EPSILON,
    Sums,
    acceptance_sums,
    annealing_weights,
    chain_sums,
    first_error_sums,
    mean_of,
    position_weights,
    streak_sums,
    subtask_sums,
    weighted_sums,
)


@dataclass(frozen=True)
class BlockScores:
    """What the supervised positions of a batch scored, `(blocks, positions)` each, counted from the first drafted token.

    Attributes:
        valid: which positions are supervised.
        known: and a label that the drafter can write.
        unbroken: and no label before it that the drafter can't. Where there is one, a chain ends for sure.
        is_right: whether the label is the likeliest token.
        log_probs: of the labels; `None` unless an objective asks for it, like the rest.
        divergences: T^2 KL(target || draft).
        confidences: how likely the target is to write all the tokens between the prefix and the label (PARD-2).
        continued: where the target's own continuation of the prefix has a token.
        continuations: log-probability of that token.
        stands_for: how many positions like it each stands for, where only some of a text's are there.
        is_hit: whether the label is among the ten likeliest tokens; `None` while training.
    """

    valid: torch.BoolTensor
    known: torch.BoolTensor
    unbroken: torch.BoolTensor
    is_right: torch.BoolTensor
    log_probs: torch.Tensor | None = None
    divergences: torch.Tensor | None = None
    confidences: torch.Tensor | None = None
    continued: torch.BoolTensor | None = None
    continuations: torch.Tensor | None = None
    stands_for: torch.Tensor | float = 1.0
    is_hit: torch.BoolTensor | None = None


@dataclass(frozen=True)
class ObjectiveSettings:
    """Numbers that objectives share; see `DraftTrainingArguments`."""

    gamma: float | None = None
    kl_gamma: float = 0.6
    dpace_alpha: float = 0.5
    reduction: str = "weight_sum"

    def decay(self, scores: BlockScores) -> torch.Tensor:
        """`(positions,)`, exp(-(k - 1) / gamma)."""
        return position_weights(scores.valid.shape[1], self.gamma, scores.valid.device)

    def annealing(self, scores: BlockScores) -> torch.Tensor:
        """`(positions,)`, kl_gamma^(k - 1)."""
        return annealing_weights(scores.valid.shape[1], self.kl_gamma, scores.valid.device)


@dataclass(frozen=True)
class Objective:
    """One term of a loss.

    Attributes:
        sums: from scores to the term's numerators and denominators.
        help: what it is, in a line.
        reads: optional fields of [`BlockScores`] that are to be computed for it.
        sign: -1 for a reward, which the loss subtracts.
        epsilon: added to the denominator, once.
        known_before: whether its denominators follow from the batch alone, and not from what the models say of it.
    """

    sums: Callable[[BlockScores, ObjectiveSettings], Sums]
    help: str
    reads: tuple[str, ...] = ("log_probs",)
    sign: int = 1
    epsilon: float = 0.0
    known_before: bool = True

    @property
    def asks_target(self) -> bool:
        """Whether the target has to say something for it."""
        return self.reads != ("log_probs",)


OBJECTIVES = {
    "cross_entropy": Objective(
        lambda s, c: weighted_sums(-s.log_probs, c.decay(s), s.known, c.reduction, s.stands_for),
        "cross-entropy with the text, weights exp(-(k - 1) / loss_gamma)",
    ),
    "subtask_cross_entropy": Objective(
        lambda s, c: subtask_sums(s.log_probs, c.decay(s), s.known),
        "PARD's: cross-entropy, each position averaged by itself, and the averages weighted as cross_entropy's positions",
    ),
    "first_error": Objective(
        lambda s, c: first_error_sums(s.log_probs, s.is_right, c.decay(s), s.unbroken, s.stands_for),
        "cross-entropy at each block's first wrong position, weights as cross_entropy's",
        epsilon=FIRST_ERROR_EPSILON,
        known_before=False,
    ),
    "chain_reward": Objective(
        lambda s, c: chain_sums(s.log_probs, s.unbroken, c.reduction, s.stands_for),
        "a surrogate of the accepted length; a reward, so it is subtracted",
        sign=-1,
    ),
    "dpace": Objective(
        lambda s, c: acceptance_sums(s.log_probs, s.unbroken, c.dpace_alpha, c.reduction, s.stands_for),
        "D-PACE: cross-entropy, weights from the drafter's own prefix probabilities (dpace_alpha)",
        known_before=False,
    ),
    "annealed_kl": Objective(
        lambda s, c: weighted_sums(s.divergences, c.annealing(s), s.valid, c.reduction, s.stands_for),
        "DART's: KL from the target's law, weights kl_gamma^(k - 1)",
        reads=("divergences",),
    ),
    "forward_kl": Objective(
        lambda s, c: weighted_sums(s.divergences, c.decay(s), s.valid, c.reduction, s.stands_for),
        "KL from the target's law, weights as cross_entropy's (kl_temperature)",
        reads=("divergences",),
    ),
    "cat_cross_entropy": Objective(
        lambda s, c: weighted_sums(-s.log_probs, s.confidences, s.known, c.reduction, s.stands_for),
        "PARD-2's: cross-entropy, weights from the target's confidence in the tokens before",
        reads=("log_probs", "confidences"),
        known_before=False,
    ),
    "cat_kl": Objective(
        lambda s, c: weighted_sums(s.divergences, s.confidences, s.valid, c.reduction, s.stands_for),
        "PARD-2's: KL from the target's law, weights as cat_cross_entropy's (kl_temperature)",
        reads=("divergences", "confidences"),
        known_before=False,
    ),
    "streak": Objective(
        lambda s, c: streak_sums(s.continuations, s.continued, c.reduction, s.stands_for),
        "SpecDiff-2's streak distillation: chain_reward on continuations that the target samples (streak_prefixes)",
        sign=-1,
        reads=("continuations", "continued"),
        known_before=False,
    ),
}


def reads_logits(names: Iterable[str]) -> bool:
    """Whether any of these objectives reads the target's logits after the text itself."""
    return any({"divergences", "confidences"} & set(OBJECTIVES[name].reads) for name in names)


# A plus sign, but not that of an exponent.
SUMMAND = re.compile(r"(?<!\d[eE])\+")


def parse_objective(objective: str | Mapping[str, float]) -> dict[str, float]:
    """The coefficient of each objective: of `"cross_entropy + 0.3*first_error + 40*chain_reward"`, or of a mapping.

    Raises:
        ValueError: for a name that is not known, is there twice, or has no positive coefficient.
    """
    if isinstance(objective, Mapping):
        terms = list(objective.items())
    else:
        terms = [_term(part, objective) for part in SUMMAND.split(str(objective))]
    if not terms:
        raise ValueError(f"an objective needs at least one of {', '.join(OBJECTIVES)}, got {objective!r}")
    coefficients: dict[str, float] = {}
    for name, coefficient in terms:
        if name not in OBJECTIVES:
            raise ValueError(f"unknown objective {name!r} in {objective!r}: the known ones are {', '.join(OBJECTIVES)}")
        if name in coefficients:
            raise ValueError(f"{name} is there twice in the objective {objective!r}: give it one coefficient")
        coefficients[name] = _checked_coefficient(name, coefficient)
    return coefficients


def _term(part: str, objective: str) -> tuple[str, str]:
    """Name and coefficient of a term such as `0.3*first_error`, `first_error*0.3` or `first_error`."""
    factors = [factor.strip() for factor in part.split("*")]
    names = [factor for factor in factors if factor[:1].isalpha()]
    if len(names) != 1 or len(factors) > 2:
        raise ValueError(
            f"an objective is a sum of names with coefficients, such as cross_entropy+0.3*first_error, got {part.strip()!r} in "
            f"{objective!r}. Rewards are subtracted as it is, so write + before them, too"
        )
    factors.remove(names[0])
    return names[0], factors[0] if factors else "1"


def _checked_coefficient(name: str, coefficient: float | str) -> float:
    try:
        value = float(coefficient)
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(coefficient, bool) or not 0 < value < math.inf:
        reward = " It is a reward, and subtracted as it is." if OBJECTIVES[name].sign < 0 else ""
        raise ValueError(f"the coefficient of {name} must be a positive number, got {coefficient!r}.{reward}")
    return value


def objective_sums(
    coefficients: Mapping[str, float], scores: BlockScores, settings: ObjectiveSettings
) -> dict[str, Sums]:
    """The sums of each objective over a batch."""
    return {name: OBJECTIVES[name].sums(scores, settings) for name in coefficients}


def total_loss(coefficients: Mapping[str, float], sums: Mapping[str, Sums]) -> torch.Tensor:
    """The weighted sum of all objectives, given numerators of a part and denominators of the whole."""
    return combined(coefficients, {name: mean_of(*part, OBJECTIVES[name].epsilon) for name, part in sums.items()})


def combined(coefficients: Mapping[str, float], values: Mapping[str, Any]) -> Any:
    """The weighted sum of what the objectives are, rewards subtracted."""
    return sum(OBJECTIVES[name].sign * coefficients[name] * value for name, value in values.items())
