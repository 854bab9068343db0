"""From what was measured to the figures of an evaluation's rows. By arithmetic alone: no model is asked, and no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .calls import Condition, TimedRun, Watched
from .measurement import Measured
from .utilisation import Utilisation, acceptance_by_position, correct_by_position, utilisation

PARTS = ("draft", "tree", "verify", "commit")


@dataclass(frozen=True)
class Difference:
    """The first place where a text is not that of plain `generate`.

    Attributes:
        prompt: number of the prompt, from 0.
        position: of the first other token, counted from the first new one.
        plain_token: what plain `generate` wrote there; `None` if its text was over.
        token: what was written instead; `None` if the text was over.
        logit_gap: by how much the target prefers plain's token, in a forward of its own over the text before; `None` if it
            was not asked.
        near_tie: whether that gap is within the rounding errors of the target's dtype.
    """

    prompt: int
    position: int
    plain_token: int | None
    token: int | None
    logit_gap: float | None = None
    near_tie: bool | None = None


@dataclass(frozen=True)
class EvaluationRow:
    """One entry under one condition.

    Attributes:
        name: of the entry.
        setting: what sets it apart, as attributes of a generation config.
        batch_size, temperature: of the condition.
        tokens_per_second: new tokens over wall-clock seconds, all prompts together, each batch with its fastest repeat.
        speedup: `tokens_per_second` over that of plain `generate` under the same condition.
        tau: mean tokens that a forward of the target commits to a text, the bonus token counted; 1 for plain `generate`. Of the
            runs whose speed is told, but where a loop does not tell of its rounds when it is timed.
        full_depth_tau: the same with `draft_schedule="fixed"`, of an entry with "auto" that is not compiled: how good the drafts
            are, whatever a machine makes of them. `None` for others.
        acceptance_by_position: share of rounds that accepted the first, second, ... drafted token, among those that drafted
            it. (With `draft_schedule="auto"` deep ones are drafted where they pay only.) `None`, as are all figures below to
            `milliseconds_by_part`, where a loop does not tell.
        correct_by_position: share of rounds whose draft has the text's token there, accepted or not.
        accept, correct, waste: shares of slots, see [`Utilisation`].
        shares: of the rounds' time, by part (draft, tree, verify, commit); they sum to 1.
        milliseconds_by_part: per round, watched, which waits for the device between the parts.
        milliseconds_per_round: of a timed call, the prompt's own forward included.
        identical: whether every run wrote exactly the tokens of plain `generate`; `None` at a temperature, where the texts
            are drawn.
        num_different: prompts whose text is another one.
        differences: where these part.
        new_tokens, seconds: what `tokens_per_second` is made of.
    """

    name: str
    setting: dict[str, Any]
    batch_size: int
    temperature: float
    tokens_per_second: float
    speedup: float
    tau: float
    full_depth_tau: float | None
    acceptance_by_position: list[float] | None
    correct_by_position: list[float] | None
    accept: float | None
    correct: float | None
    waste: float | None
    shares: dict[str, float] | None
    milliseconds_by_part: dict[str, float] | None
    milliseconds_per_round: float
    identical: bool | None
    num_different: int | None
    new_tokens: int
    seconds: float
    differences: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """The figures of a row that need no watching, by the same names; see [`EvaluationRow`]."""

    name: str
    tokens_per_second: float
    speedup: float
    tau: float
    identical: bool | None


def fastest(measured: Measured) -> list[TimedRun]:
    """The fastest repeat of each batch: other work on the machine can only make a run slower, never faster."""
    return [min(repeats, key=lambda run: run.seconds) for repeats in measured.runs if repeats]


def speed(measured: Measured) -> float:
    """New tokens a second."""
    runs = fastest(measured)
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


def acceptance_length(measured: Measured) -> float:
    """Tau: of the runs whose speed is told, or, where a loop does not tell of its rounds, of what was watched."""
    runs = fastest(measured)
    return mean_committed(runs if any(run.tokens_per_round for run in runs) else measured.watched)


def mean_committed(seen: Sequence[Watched | TimedRun]) -> float:
    """Tokens that a round commits to a text."""
    counts = [count for each in seen for count in each.tokens_per_round]
    return sum(counts) / len(counts)


def differences_between(measured: Measured, plain: Measured, batch_size: int) -> list[Difference]:
    """The first difference of each prompt's text, in the first of its runs that has one."""
    found: dict[int, Difference] = {}
    for index, repeats in enumerate(measured.runs):
        expected = plain.runs[index][0].texts
        watched = [
            each.texts for seen in (measured.watched, measured.at_full_depth) for each in seen[index : index + 1]
        ]
        for texts in [*watched, *(run.texts for run in repeats)]:
            for item, (written, text) in enumerate(zip(texts, expected, strict=True)):
                prompt = index * batch_size + item
                difference = None if prompt in found else first_difference(text, written, prompt)
                if difference is not None:
                    found[prompt] = difference
    return [found[prompt] for prompt in sorted(found)]


def first_difference(plain: Sequence[int], text: Sequence[int], prompt: int = 0) -> Difference | None:
    """Where `text` parts from `plain`; `None` if it does not."""
    for position in range(max(len(plain), len(text))):
        expected = plain[position] if position < len(plain) else None
        found = text[position] if position < len(text) else None
        if expected != found:
            return Difference(prompt, position, expected, found)
    return None


def compare(measured: list[Measured], condition: Condition) -> list[Comparison]:
    """What the clock alone tells of each entry, the first of which is plain `generate`."""
    plain = measured[0]
    is_greedy = condition.temperature == 0
    return [
        Comparison(
            name=each.entry.name,
            tokens_per_second=speed(each),
            speedup=speed(each) / speed(plain),
            tau=acceptance_length(each),
            identical=not differences_between(each, plain, condition.batch_size) if is_greedy else None,
        )
        for each in measured
    ]


def summarise(measured: Measured, plain: Measured, condition: Condition) -> EvaluationRow:
    """The row of one entry, beside plain `generate` under the same condition."""
    runs, watched = fastest(measured), measured.watched
    rounds = sum(each.rounds for each in watched)
    timed_rounds = sum(run.rounds for run in runs) or rounds
    seconds = sum(run.seconds for run in runs)
    is_greedy = condition.temperature == 0
    differences = differences_between(measured, plain, condition.batch_size) if is_greedy else []
    parts = {part: sum(w.seconds.get(part, 0.0) for w in watched) for part in PARTS}
    total = sum(parts.values())
    return EvaluationRow(
        name=measured.entry.name,
        setting=dict(measured.entry.setting),
        batch_size=condition.batch_size,
        temperature=condition.temperature,
        tokens_per_second=speed(measured),
        speedup=speed(measured) / speed(plain),
        tau=acceptance_length(measured),
        full_depth_tau=mean_committed(measured.at_full_depth) if measured.at_full_depth else None,
        **drafting_figures(measured),
        shares={part: value / total for part, value in parts.items()} if total else None,
        milliseconds_by_part={part: 1000 * value / rounds for part, value in parts.items()} if total else None,
        milliseconds_per_round=1000 * seconds / timed_rounds,
        identical=not differences if is_greedy else None,
        num_different=len(differences) if is_greedy else None,
        new_tokens=sum(run.num_tokens for run in runs),
        seconds=seconds,
        differences=differences,
    )


def drafting_figures(measured: Measured) -> dict[str, Any]:
    """What became of the drafts; `None` for each figure where the loop does not tell."""
    # Items of one batch must not be taken for those of another.
    split, proposals, texts = Utilisation(), [], []
    for watched in measured.watched:
        split += utilisation(watched.proposals, watched.texts)
        proposals += watched.proposals
        texts += [watched.texts[proposal.item] for proposal in watched.proposals]
    if not proposals:
        names = ("acceptance_by_position", "correct_by_position", "accept", "correct", "waste")
        return dict.fromkeys(names)
    return {
        "acceptance_by_position": acceptance_by_position(proposals),
        "correct_by_position": correct_by_position(proposals, texts),
        "accept": split.accept_share,
        "correct": split.correct_share,
        "waste": split.waste_share,
    }
