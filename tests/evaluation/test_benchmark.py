"""The comparison's figures: what they are made of, and that they come out of real runs."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_pardraft import AutoDrafter
from hf_pardraft.evaluation import benchmark
from hf_pardraft.evaluation.benchmark import PLAIN, Contender, compare, timed_run, without_padding
from hf_pardraft.evaluation.metrics import TimedRun, summarise


def test_each_prompt_counts_with_its_fastest_repeat():
    plain = [[TimedRun((1, 2), (1, 1), 4.0), TimedRun((1, 2), (1, 1), 2.0)], [TimedRun((3, 4), (1, 1), 2.0)] * 2]
    drafted = [[TimedRun((1, 2), (2,), 1.0), TimedRun((1, 2), (2,), 3.0)], [TimedRun((3, 4), (1, 1), 1.0)] * 2]
    row = summarise("drafted", drafted, plain)
    assert row.tokens_per_second == pytest.approx(4 / 2.0)
    assert row.speedup == pytest.approx(2.0)
    assert row.tau == pytest.approx(8 / 6)
    assert row.identical


def test_one_other_token_in_one_repeat_is_not_identical():
    plain = [[TimedRun((1, 2), (1, 1), 1.0)] * 2]
    drafted = [[TimedRun((1, 2), (2,), 1.0), TimedRun((1, 3), (2,), 1.0)]]
    assert not summarise("drafted", drafted, plain).identical


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_comparison_runs_every_contender(tiny_family, batch_size):
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    drafters = {name: Contender(AutoDrafter.from_pretrained(tiny_family / name)) for name in ("pard", "dflash")}
    prompts = [torch.tensor([[7, 8, 9]]), torch.tensor([[5]])]
    rows = compare(target, drafters, prompts, max_new_tokens=6, repeats=2, batch_size=batch_size)
    assert [row.name for row in rows] == [PLAIN, "pard", "dflash"]
    assert rows[0].speedup == 1.0
    assert rows[0].tau == 1.0
    assert all(row.identical and row.tokens_per_second > 0 and row.tau >= 1 for row in rows)
    # The tiny PARD drafter is its target, so each of its first guesses is right.
    assert rows[1].tau >= 1.5


def test_a_sampled_comparison_draws_the_same_in_every_repeat(tiny_family, monkeypatch):
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    # What the target's own settings would cut the law short by.
    target.generation_config.top_k = 1
    drafters = {name: Contender(AutoDrafter.from_pretrained(tiny_family / name)) for name in ("pard", "dflash")}
    drafters["tree"] = Contender(drafters["pard"].drafter, {"tree_budget": 6})
    texts = []

    def noted(*args):
        run = timed_run(*args)
        texts.append(run.new_ids)
        return run

    monkeypatch.setattr(benchmark, "timed_run", noted)
    prompts = [torch.tensor([[7, 8, 9]])] * 2
    torch.manual_seed(5)
    state = torch.get_rng_state()
    options = {"max_new_tokens": 12, "repeats": 2, "temperature": 1.0}
    rows = compare(target, drafters, prompts, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert [row.name for row in rows] == [PLAIN, "pard", "dflash", "tree"]
    assert [row.identical for row in rows] == [None] * 4
    assert rows[0].tau == 1.0
    assert all(row.tokens_per_second > 0 and row.tau >= 1 for row in rows)
    # After warming up, a text for each contender, prompt (the same twice, with another seed) and repeat.
    first, second, *repeated = (texts[start : start + 4] for start in (4, 8, 12, 16))
    assert repeated == [first, second]
    assert all(one != other for one, other in zip(first, second, strict=True))
    again = compare(target, drafters, prompts, **options)
    assert [row.tau for row in again] == [row.tau for row in rows]
    compare(target, drafters, prompts, seed=1, **options)
    assert texts[-16:-12] == second


def test_a_comparison_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        compare(None, {}, [], max_new_tokens=4)
    with pytest.raises(ValueError, match="'plain' is that of generate"):
        compare(None, {PLAIN: Contender(None)}, [torch.tensor([[1]])], max_new_tokens=4)
    with pytest.raises(ValueError, match="temperature"):
        compare(None, {}, [torch.tensor([[1]])], max_new_tokens=4, temperature=-1.0)


def test_padding_behind_an_end_of_text_is_not_counted():
    assert without_padding([4, 5, 2, 0, 0], {2}) == [4, 5, 2]
    assert without_padding([4, 5], {2}) == [4, 5]
