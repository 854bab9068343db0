"""One cell of smollm2.py: counts, which no busy machine changes, or seconds, for which all ways take turns on each text."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_pardraft.evaluation.calls import Condition, TimedRun, run, watch
from hf_pardraft.evaluation.entries import compiled_twin, plain_entry
from hf_pardraft.evaluation.measurement import Measured, in_batches, kept_random_state, take_turns, warm_up
from hf_pardraft.evaluation.rows import acceptance_length, differences_between, drafting_figures
from hf_pardraft.evaluation.runner import judge_near_tie
from hf_pardraft.generation.settings import DEFAULT_LOOKUP
from hf_pardraft.user_input.models import end_of_text_ids
from smollm2_cases import SCHEDULED, Models, Way

# What a call looks up by default.
LOOKED_UP = 2
Row = dict[str, Any]


def plain_of(models: Models, prompts: list[torch.LongTensor], condition: Condition) -> Measured:
    """What plain `generate` writes; its seconds are nobody's business."""
    entry, batches = plain_entry(), in_batches(models.target, prompts, condition.batch_size)
    with kept_random_state(models.target.device):
        runs = [[run(models.target, entry, batch, condition.on_batch(i))] for i, batch in enumerate(batches)]
    return Measured(entry, runs, [])


def counted(
    models: Models, ways: list[Way], prompts: list[torch.LongTensor], condition: Condition
) -> Iterator[list[Row]]:
    """The row of each way, watched round by round on every text: how far its drafts got, and whether the text is plain's."""
    plain = plain_of(models, prompts, condition)
    batches = in_batches(models.target, prompts, condition.batch_size)
    for way in ways:
        facts = way.facts(models.weights)
        if way.way == "prompt_lookup":
            yield [{**facts, **looked_up(models.target, prompts, plain, condition)}]
            continue
        with kept_random_state(models.target.device):
            watched = [watch(models.target, way.entry, batch, condition.on_batch(i)) for i, batch in enumerate(batches)]
        measured = Measured(way.entry, [[] for _ in batches], watched)
        counts = [count for each in watched for count in each.tokens_per_round]
        figures = {"tau": acceptance_length(measured), "tokens": sum(counts), "rounds": len(counts)}
        same = compared(models.target, prompts, measured, plain, condition)
        yield [{**facts, **figures, **drafting_figures(measured), **same}]


def compared(
    target: PreTrainedModel, prompts: list[torch.LongTensor], measured: Measured, plain: Measured, condition: Condition
) -> Row:
    """How many texts are not plain's, and in how many of those the target itself could not tell the tokens apart."""
    texts = [text for repeats in plain.runs for text in repeats[0].texts]
    differences = differences_between(measured, plain, condition.batch_size)
    ties = None
    if condition.temperature == 0:
        judged = (judge_near_tie(target, prompts[each.prompt], texts[each.prompt], each) for each in differences)
        ties = sum(bool(each.near_tie) for each in judged)
    return {"texts": len(texts), "different": len(differences), "near_ties": ties}


def looked_up(target: PreTrainedModel, prompts: list[torch.LongTensor], plain: Measured, condition: Condition) -> Row:
    """tau of transformers' prompt lookup, by what it proposes all along plain's greedy text: no forward is needed for that."""
    texts = [text for repeats in plain.runs for text in repeats[0].texts]
    ends = torch.tensor(sorted(end_of_text_ids(target)))
    counts: list[int] = []
    for prompt, text in zip(prompts, texts, strict=True):
        lookup = PromptLookupCandidateGenerator(
            eos_token_id=ends if len(ends) else None,
            num_output_tokens=DEFAULT_LOOKUP,
            max_matching_ngram_size=LOOKED_UP,
            max_length=prompt.shape[1] + condition.max_new_tokens,
        )
        counts += rounds_of(lookup, prompt, text)
    figures = {"tau": sum(counts) / len(counts), "tokens": sum(counts), "rounds": len(counts)}
    return {**figures, "texts": len(texts), "different": 0, "near_ties": 0}


def rounds_of(lookup: PromptLookupCandidateGenerator, prompt: torch.LongTensor, text: tuple[int, ...]) -> list[int]:
    """Tokens that each round commits of a text that is known."""
    counts: list[int] = []
    while (done := sum(counts)) < len(text):
        known = torch.cat([prompt[0], torch.tensor(text[:done], dtype=torch.long)])[None]
        proposed = lookup.get_candidates(known)[0][0, known.shape[1] :].tolist()
        accepted = next(
            (n for n, pair in enumerate(zip(proposed, text[done:], strict=False)) if len({*pair}) > 1), None
        )
        accepted = min(len(proposed), len(text) - done) if accepted is None else accepted
        counts.append(min(accepted + 1, len(text) - done))
    return counts


def timed(
    models: Models, ways: list[Way], prompts: list[torch.LongTensor], condition: Condition
) -> Iterator[list[Row]]:
    """The rows of plain `generate`, eager and (with compiled ways) compiled, and of each way, by the clock; all at once."""
    plain = plain_entry()
    everyone = [Way(plain, "plain"), *ways]
    if any(way.compiled for way in ways):
        everyone.insert(1, Way(compiled_twin(plain), "plain", compiled=True))
    target, batches = models.target, in_batches(models.target, prompts, condition.batch_size)
    measured = [Measured(way.entry, [[] for _ in batches], []) for way in everyone]
    with kept_random_state(target.device):
        for way in everyone:
            warm_up(target, way.entry, batches, condition)
            if way.compiled or way.way in SCHEDULED:
                # Shapes are compiled, and costs are learned, where they come up: in a turn that does not count.
                for index, batch in enumerate(batches):
                    run(target, way.entry, batch, condition.on_batch(index))
        take_turns(target, measured, batches, condition)
    rows = []
    for way, own in zip(everyone, measured, strict=True):
        row = {**way.facts(models.weights), **speed_of(own, measured[0]), "tau": tau_of(own)}
        if way.way == "prompt_lookup" and condition.temperature == 0:
            row["tau"] = looked_up(target, prompts, measured[0], condition)["tau"]
        rows.append({**row, **compared(target, prompts, own, measured[0], condition)})
    yield rows


def tau_of(measured: Measured) -> float | None:
    """Of what was timed; transformers' assisted loops do not tell."""
    return acceptance_length(measured) if measured.runs[0][0].tokens_per_round else None


def speed_of(measured: Measured, plain: Measured) -> Row:
    """Tokens a second of whole calls, and how many times plain eager `generate`: of each text the median of its turns' ratios.

    A machine that is slower for some seconds is so for both, which come soon after each other. Of all texts, each counts as long
    as plain `generate` takes for it.
    """
    texts = list(zip(measured.runs, plain.runs, strict=True))
    ratios = [median(map(ratio, own, theirs)) for own, theirs in texts]
    plain_seconds = [median(each.seconds for each in theirs) for _, theirs in texts]
    seconds = [median(each.seconds for each in own) for own, _ in texts]
    tokens = sum(own[0].num_tokens for own, _ in texts)
    return {
        "tokens": tokens,
        "seconds": sum(seconds),
        "tokens_per_second": tokens / sum(seconds),
        "over_eager_plain": sum(plain_seconds) / sum(s / r for s, r in zip(plain_seconds, ratios, strict=True)),
        "turns": len(texts[0][0]),
    }


def ratio(run: TimedRun, plain: TimedRun) -> float:
    """How many times as many tokens a second: near ties may make a text longer than plain's."""
    return (run.num_tokens / run.seconds) / (plain.num_tokens / plain.seconds)


def warm_longest(models: Models, prompts: list[torch.LongTensor], condition: Condition) -> None:
    """Let plain `generate` make its static cache as large as any text of a command needs: each size is compiled anew."""
    longest = max(prompts, key=lambda prompt: prompt.shape[1])
    entry = compiled_twin(plain_entry())
    run(
        models.target,
        entry,
        in_batches(models.target, [longest] * condition.batch_size, condition.batch_size)[0],
        condition,
    )
