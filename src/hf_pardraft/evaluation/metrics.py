"""From timed `generate` calls to the figures of a comparison. Pure: no model, no clock."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TimedRun:
    """One `generate` call.

    Attributes:
        new_ids: the tokens that it added to the prompts, one prompt after the other, padding left out.
        tokens_per_round: how many of them each round (one forward of the target) committed to a row.
        seconds: wall-clock time of the call, the prompt's own forward included.
    """

    new_ids: tuple[int, ...]
    tokens_per_round: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class ComparisonRow:
    """One contender of a comparison.

    Attributes:
        name: what the caller named it.
        tokens_per_second: new tokens over wall-clock seconds, summed over the prompts.
        speedup: `tokens_per_second` over that of plain `generate`.
        tau: mean tokens committed per round, the bonus token counted; 1 for plain `generate`.
        identical: whether every run wrote exactly the tokens of plain `generate`; `None` where the text was sampled.
    """

    name: str
    tokens_per_second: float
    speedup: float
    tau: float
    identical: bool | None


def tokens_per_second(runs: list[list[TimedRun]]) -> float:
    """Throughput over all prompts, of `runs[prompt][repeat]`.

    Each prompt counts with its fastest repeat: other work on the machine can only make a run slower, never faster.
    """
    fastest = [min(repeats, key=lambda run: run.seconds) for repeats in runs]
    return sum(len(run.new_ids) for run in fastest) / sum(run.seconds for run in fastest)


def acceptance_length(runs: list[list[TimedRun]]) -> float:
    """Tau: mean tokens committed per round, over all rounds of `runs[prompt][repeat]`."""
    rounds = [num_tokens for repeats in runs for run in repeats for num_tokens in run.tokens_per_round]
    return sum(rounds) / len(rounds)


def same_text(runs: list[list[TimedRun]], reference: list[list[TimedRun]]) -> bool:
    """Whether every repeat of every prompt wrote the tokens that the reference wrote for that prompt."""
    return all(
        run.new_ids == expected[0].new_ids for repeats, expected in zip(runs, reference, strict=True) for run in repeats
    )


def summarise(
    name: str, runs: list[list[TimedRun]], plain: list[list[TimedRun]], is_sampled: bool = False
) -> ComparisonRow:
    """The row of one contender; `runs` and `plain` (runs without a drafter) are indexed `[prompt][repeat]`."""
    speed = tokens_per_second(runs)
    return ComparisonRow(
        name=name,
        tokens_per_second=speed,
        speedup=speed / tokens_per_second(plain),
        tau=acceptance_length(runs),
        identical=None if is_sampled else same_text(runs, plain),
    )
