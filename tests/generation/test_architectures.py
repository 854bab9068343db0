"""On targets of many architectures a drafter leaves the text as it is, or is refused: a sample of benchmarks/architectures.py."""

import pytest
import torch

EVERYTHING = ["yes"] * 4
REFUSED = ["no"] * 4
# Each for something that its forward, its cache or its configuration does otherwise: served for chains and trees of one
# sequence, for batches, and for drafters that read hidden states.
SAMPLE = {
    ("gpt2", "default"): EVERYTHING,
    ("llama", "rope longrope"): EVERYTHING,
    ("llama", "rope dynamic"): EVERYTHING,
    ("gemma3_text", "rope longrope"): EVERYTHING,
    ("phi3", "rope longrope"): EVERYTHING,
    ("gpt_oss", "default"): EVERYTHING,
    ("deepseek_v3", "groups"): EVERYTHING,
    ("gemma4_text", "shared entries"): EVERYTHING,
    ("ministral3", "temperature"): EVERYTHING,
    ("cohere2", "default"): EVERYTHING,
    ("got_ocr2", "default"): EVERYTHING,
    # The cache has layers that hold nothing, and others' layers read them.
    ("gemma3n_text", "default"): ["yes", "yes", "yes", "no"],
    # Reads one branch, of one sequence.
    ("qwen3_next", "default"): ["yes", "yes", "no", "yes"],
    # A column of the cache is not a position.
    ("llama4_text", "temperature 8"): ["yes", "no", "no", "yes"],
    ("falcon", "alibi"): ["yes", "no", "no", "no"],
    ("bart", "default"): ["yes", "no", "no", "yes"],
    # What a forward says of a token depends on what else it reads.
    ("doge", "experts"): REFUSED,
    ("moshi", "default"): REFUSED,
    ("bamba", "time step limit"): REFUSED,
    ("nemotron_h", "default"): REFUSED,
    # More than the new tokens go into a step.
    ("xlm", "default"): REFUSED,
    ("openai-gpt", "default"): REFUSED,
    # A cache that can't forget.
    ("deepseek_v32", "default"): REFUSED,
    ("jamba", "default"): REFUSED,
}


@pytest.mark.parametrize(("architecture", "variant"), SAMPLE)
def test_the_text_is_plain_generates_or_the_call_is_refused(architecture, variant):
    from architecture_page import columns_of, was_tried
    from architecture_trials import try_variant

    row = try_variant(architecture, variant)
    assert was_tried(row), row
    assert not row["differs"]
    assert not row["crashed"]
    assert columns_of(row) == SAMPLE[architecture, variant]
    assert all(len(message) < 500 and "\n" not in message for message in row["refused"])


@pytest.mark.parametrize("error", [None, RuntimeError("index out of range"), ValueError("raised somewhere else")])
def test_the_sweep_notices_wrong_texts_and_raw_errors(monkeypatch, error):
    import architecture_trials

    write = architecture_trials.write

    def write_wrongly(target, inputs, drafter=None, ends=None, **options):
        texts = write(target, inputs, drafter, ends, **options)
        if drafter is None:
            return texts
        if error is not None:
            raise error
        texts[-1, -2] += 1
        return texts

    monkeypatch.setattr(architecture_trials, "write", write_wrongly)
    row = architecture_trials.try_variant("llama", "default")
    assert not row["same"]
    assert not row["refused"]
    assert len(row["differs"]) == (len(architecture_trials.CASES) if error is None else 0)
    assert len(row["crashed"]) == (0 if error is None else 1)
    if error is None:
        assert row["differs"][0]["float64"] == "differs"
        assert row["differs"][0]["after"] == architecture_trials.NEW_TOKENS - 2


def test_oracles_are_right_as_often_as_they_are_said_to_be():
    """If their drafts were never accepted, wrong texts would not show."""
    import architecture_trials as trials
    from architecture_cases import tiny_model

    target = tiny_model("llama")
    inputs = trials.prompts(trials.RAGGED, trials.vocab_size_of(target))
    expected = trials.write(target, inputs)
    for kind in ("pard", "dflash"):
        drafter = trials.MAKERS[kind](target)
        with trials.knowing(drafter, trials.without_padding(expected, inputs)):
            assert torch.equal(trials.write(target, inputs, drafter), expected)
        # 0.75 + 0.75 ** 2 + ... of five drafts, and the bonus token.
        assert 2.3 < drafter.last_stats.tau < 4.3
