"""A tuned drafter: each batch size drafts as its table says, the caller goes first, and the text stays the same."""

import json

import pytest
import torch
from transformers import GenerationConfig

from hf_pardraft import AutoDrafter
from hf_pardraft.generation.schedule import nearest_size, with_table
from tiny_models import random_prompt, tiny_drafter, tiny_target

TABLE = {
    "by_batch_size": {
        "1": {"num_assistant_tokens": 3, "tree_budget": 7},
        "2": {"num_assistant_tokens": 2},
        "8": {"num_assistant_tokens": 0},
    }
}
NEW = 12


def prompts(batch: int) -> dict[str, torch.Tensor]:
    ids = torch.cat([random_prompt(5, seed=seed) for seed in range(batch)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def tuned_drafter(kind, target, table=TABLE):
    drafter = tiny_drafter(kind, target)
    drafter.generation_config.tuned_drafting = table
    return drafter


def drafted(target, drafter, batch=1, **options):
    """The text, and the tokens that a round proposed at most."""
    config = GenerationConfig(**{"max_new_tokens": NEW, "do_sample": False, **options})
    text = target.generate(**prompts(batch), assistant_model=drafter, generation_config=config)
    return text, max(drafter.last_stats.drafted_per_round)


@pytest.mark.parametrize("kind", ["pard", "dflash", "dflare", "dart"])
def test_each_batch_size_drafts_as_the_table_says_and_writes_the_same(kind):
    target = tiny_target()
    drafter = tuned_drafter(kind, target)
    for batch, most in ((1, 7), (2, 2), (3, 2), (8, 0), (9, 0)):
        plain = target.generate(**prompts(batch), max_new_tokens=NEW, do_sample=False)
        text, proposed = drafted(target, drafter, batch)
        assert proposed == most
        assert torch.equal(text, plain)


def test_a_size_between_two_takes_the_nearer_by_ratio():
    sizes = [1, 2, 8]
    assert [nearest_size(sizes, batch) for batch in (1, 2, 3, 4, 5, 8, 300)] == [1, 2, 2, 2, 8, 8, 8]


def test_what_the_caller_asks_for_goes_first():
    target = tiny_target()
    drafter = tuned_drafter("dflash", target)
    assert drafted(target, drafter, num_assistant_tokens=1)[1] == 1
    assert drafted(target, drafter, tree_budget=5)[1] == 5
    assert drafted(target, drafter, batch=8, num_assistant_tokens=4)[1] == 4
    assert drafted(target, drafter, tree_budget=0)[1] == 4
    text = target.generate(**prompts(1), assistant_model=drafter, max_new_tokens=NEW, num_assistant_tokens=2)
    assert (text.shape[1], max(drafter.last_stats.drafted_per_round)) == (5 + NEW, 2)


def test_the_drafters_own_setting_goes_first_where_it_is_newer_than_the_table():
    target = tiny_target()
    own = {"num_assistant_tokens": None, "tree_budget": None}
    drafter = tuned_drafter("dflash", target, {**TABLE, "instead_of": own})
    assert drafted(target, drafter)[1] == 7
    drafter.generation_config.tree_budget = 0
    assert drafted(target, drafter)[1] == 4


def test_a_table_of_another_kind_of_device_is_left_alone():
    target = tiny_target()
    drafter = tuned_drafter("dflash", target, {**TABLE, "measured_on": {"device_type": "cuda"}})
    assert drafted(target, drafter)[1] == 4
    drafter = tuned_drafter("dflash", target, {**TABLE, "measured_on": {"device_type": "cpu"}})
    assert drafted(target, drafter)[1] == 7


@pytest.mark.parametrize("setting", [{"decode_loop": "stock"}, {"verification": "rejection"}])
def test_ways_that_take_no_trees_draft_as_ever(setting):
    target = tiny_target()
    drafter, untuned = tuned_drafter("dflash", target), tiny_drafter("dflash", target)
    text = drafted(target, drafter, **setting)[0]
    assert torch.equal(text, drafted(target, untuned, **setting)[0])
    assert drafter.last_stats.drafted_per_round == untuned.last_stats.drafted_per_round


def test_transformers_own_dflash_loop_takes_no_notice():
    target = tiny_target()
    plain = target.generate(**prompts(1), max_new_tokens=NEW, do_sample=False)
    options = {"assistant_model": tuned_drafter("dflash", target), "speculation_type": "dflash"}
    assert torch.equal(target.generate(**prompts(1), max_new_tokens=NEW, do_sample=False, **options), plain)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 5}])
@pytest.mark.parametrize("end", [None, 7])
def test_where_drafting_does_not_pay_it_is_plain_generate(sampling, end):
    target = tiny_target(eos_token_id=end)
    drafter = tuned_drafter("pard", target, {"by_batch_size": {1: {"num_assistant_tokens": 0}}})
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, **sampling}
    torch.manual_seed(3)
    plain = target.generate(**prompts(3), **options)
    torch.manual_seed(3)
    found = target.generate(**prompts(3), assistant_model=drafter, **options)
    assert torch.equal(found.sequences, plain.sequences)
    assert all(map(torch.equal, found.scores, plain.scores))
    stats, rows = drafter.last_stats, plain.sequences[:, 5:].tolist()
    lengths = [row.index(end) + 1 if end in row else len(row) for row in rows]
    assert (stats.rounds, sum(stats.tokens_per_round), stats.tau) == (len(rows[0]), sum(lengths), 1.0)
    assert stats.rows_per_round == [sum(length > step for length in lengths) for step in range(len(rows[0]))]


def test_several_return_sequences_count_as_rows():
    target = tiny_target()
    drafter = tuned_drafter("dflash", target)
    target.generate(**prompts(1), assistant_model=drafter, max_new_tokens=NEW, do_sample=True, num_return_sequences=2)
    assert max(drafter.last_stats.drafted_per_round) == 2


COMPILED = {"by_batch_size": {"1": {"num_assistant_tokens": 1}, "2": {"num_assistant_tokens": 4, "tree_budget": 6}}}


@pytest.mark.parametrize(
    ("table", "eager", "compiled"),
    [
        ({**TABLE, "compiled": COMPILED}, (7, 2), (1, 6)),
        (TABLE, (7, 2), (7, 2)),
        ({"compiled": COMPILED}, (4, 4), (1, 6)),
        ({**TABLE, "compiled": {**COMPILED, "measured_on": {"device_type": "cuda"}}}, (7, 2), (4, 4)),
    ],
)
def test_compiled_rounds_may_have_a_table_of_their_own(monkeypatch, table, eager, compiled):
    monkeypatch.setattr(torch, "compile", lambda piece, **options: piece)
    target = tiny_target()
    drafter = tuned_drafter("dflash", target, table)
    for batch in (1, 2):
        plain = target.generate(**prompts(batch), max_new_tokens=NEW, do_sample=False)
        for options, most in (({}, eager), ({"cache_implementation": "static"}, compiled)):
            text, proposed = drafted(target, drafter, batch, **options)
            assert proposed == most[batch - 1]
            assert torch.equal(text, plain)


def test_a_new_table_leaves_that_of_the_other_kind_of_rounds():
    facts = {"measured_on": {"device_type": "cpu"}}
    assert with_table(None, TABLE, False) == TABLE
    assert with_table(None, TABLE, True) == {"compiled": TABLE}
    assert with_table({**TABLE, **facts}, COMPILED, False) == COMPILED
    assert with_table({**TABLE, **facts}, COMPILED, True) == {**TABLE, **facts, "compiled": COMPILED}
    both = {**TABLE, "compiled": COMPILED}
    assert with_table(both, {**COMPILED, **facts}, False) == {**COMPILED, **facts, "compiled": COMPILED}
    assert with_table(both, {**TABLE, **facts}, True) == {**TABLE, "compiled": {**TABLE, **facts}}


def test_the_table_is_saved_with_the_drafter(tmp_path):
    target = tiny_target()
    tuned_drafter("dflash", target, {"by_batch_size": {2: {"num_assistant_tokens": 1}}}).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved["tuned_drafting"] == {"by_batch_size": {"2": {"num_assistant_tokens": 1}}}
    drafter = AutoDrafter.from_pretrained(tmp_path)
    assert drafted(target, drafter, batch=2)[1] == 1


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "must be a dict like"),
        ({"by_batch_size": {}}, "must be a dict like"),
        ({**TABLE, "by_batch": {}}, r"got \['by_batch'\]"),
        ({**TABLE, "measured_on": "a GPU"}, "measured_on must be a dict"),
        ({**TABLE, "compiled": None}, "must be a dict like"),
        ({**TABLE, "compiled": {**TABLE, "compiled": TABLE}}, r"got \['compiled'\]"),
        ({"measured_on": {}, "compiled": TABLE}, "must be a dict like"),
        ({"by_batch_size": {"one": {"num_assistant_tokens": 1}}}, "batch size .* got 'one'"),
        ({"by_batch_size": {"0": {"num_assistant_tokens": 1}}}, "batch size .* got '0'"),
        ({"by_batch_size": {"1": {"num_assistant_tokens": 1}, 1: {"num_assistant_tokens": 2}}}, "twice"),
        ({"by_batch_size": {"1": {"tree_budget": 8}}}, "must have num_assistant_tokens"),
        ({"by_batch_size": {"1": {"num_assistant_tokens": 1, "tree": 8}}}, "may have tree_budget"),
        ({"by_batch_size": {"1": {"num_assistant_tokens": True}}}, "at least 0, got True"),
        ({"by_batch_size": {"1": {"num_assistant_tokens": -1}}}, "at least 0, got -1"),
        ({"by_batch_size": {"4": {"num_assistant_tokens": 5}}}, "drafts 5 tokens at batch size 4, .* can draft 4"),
        ({"by_batch_size": {"4": {"num_assistant_tokens": 0, "tree_budget": 3}}}, "set both, or neither"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_before_any_work(table, message, monkeypatch):
    target = tiny_target()
    drafter = tuned_drafter("dflash", target, table)
    monkeypatch.setattr(type(target), "forward", lambda *rest, **more: pytest.fail("the target was run"))
    with pytest.raises(ValueError, match=f"(?s){message}.*pardraft eval --tune"):
        drafted(target, drafter)


def test_rounds_are_timed_one_by_one():
    target = tiny_target()
    drafter = tiny_drafter("dflash", target)
    drafted(target, drafter, batch=2, time_rounds=True)
    stats = drafter.last_stats
    assert set(stats.seconds_per_round) == {"draft", "tree", "verify", "commit"}
    for part, seconds in stats.seconds_per_round.items():
        assert len(seconds) == stats.rounds == len(stats.rows_per_round)
        assert sum(seconds) == pytest.approx(stats.seconds[part])
    assert sum(stats.rows_per_round) == len(stats.tokens_per_round)
