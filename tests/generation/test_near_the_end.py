"""How a call comes to its end: reminders of long texts, tables of positions, and drafts where rows have different room."""

from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig, GPT2Config, GPTJConfig, MptConfig, OPTConfig, XGLMConfig
from transformers.generation import stopping_criteria

from hf_pardraft.generation.target_side.positions import num_positions
from pairwise import every_two_meet
from tiny_models import batch_oracle, make_oracle, ragged_prompts, random_prompt, tiny_drafter, tiny_target

LONGEST = 24


def written(target, prompts, **options):
    return target.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, **options)


@pytest.fixture
def reminders(monkeypatch):
    """What the length criterion logs; transformers does so once in a process, and here each time."""
    messages = []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", messages.append)
    return messages


@pytest.mark.parametrize("new_tokens", [5, 12])
@pytest.mark.parametrize("budget", [0, 6])
def test_a_text_longer_than_the_target_s_positions_is_reminded_of_as_in_plain_generate(reminders, budget, new_tokens):
    target, prompt = tiny_target("llama", max_position_embeddings=LONGEST), random_prompt(16)
    plain = written(target, prompt, max_new_tokens=new_tokens)
    expected, reminders[:] = list(reminders), []
    drafter = make_oracle(tiny_drafter("pard", target), plain[0], rates=[0.8] * 4)
    drafter.generation_config.tree_budget = budget
    assert torch.equal(written(target, prompt, max_new_tokens=new_tokens, assistant_model=drafter), plain)
    assert bool(expected) == (16 + new_tokens > LONGEST)
    assert reminders == expected


def test_the_shortest_row_decides_how_deep_a_batch_is_drafted():
    """While one row nears the end, another that has far to go is drafted for in full."""
    target, prompts = tiny_target("llama"), torch.cat([random_prompt(6, seed=seed) for seed in range(2)])
    texts = written(target, prompts, max_new_tokens=20)
    # The first row is always right, the second never.
    wrong = (texts[1] + 1) % 64
    drafter = make_oracle(tiny_drafter("pard", target), [texts[0], wrong], rates=[1.0] * 4)
    drafter.generation_config.record_drafts = True
    assert torch.equal(written(target, prompts, max_new_tokens=20, assistant_model=drafter), texts)
    ends = [proposal for proposal in drafter.last_stats.proposals if proposal.item == 0 and proposal.num_before > 15]
    assert ends
    depths = {
        proposal.num_before: len(proposal.tokens) for proposal in drafter.last_stats.proposals if proposal.item == 1
    }
    # A round commits one token more than it drafts, so after 16 of 20 tokens there is room for three.
    assert depths == {before: min(4, 19 - before) for before in depths}
    assert len(depths) > 12


IDS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
OF_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST, "initializer_range": 0.2}
OF_OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}
OF_MPT = {"d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "initializer_range": 0.2}
TABLES = {
    "gpt2": GPT2Config(**IDS, **OF_GPT),
    "opt": OPTConfig(**IDS, **OF_OPT, max_position_embeddings=LONGEST, init_std=0.2),
    "gptj": GPTJConfig(**IDS, **OF_GPT, rotary_dim=4),
    "mpt": MptConfig(**IDS, **OF_MPT, max_seq_len=LONGEST, use_cache=True),
}


def with_a_table(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(TABLES[name]).eval()


def ends_at(column):
    """A criterion that is met by texts of so many columns."""
    return [lambda ids, scores, **kwargs: torch.full((len(ids),), ids.shape[1] >= column)]


def beyond_positions(target, given, make_drafter, loop="native", **options):
    """Texts, plain and drafted, of a call that might go on after the last position."""
    ids, mask = given
    options |= {"attention_mask": mask, "do_sample": False, "max_length": 2 * LONGEST}
    plain = target.generate(ids, **options)
    drafter = make_drafter(plain)
    drafter.generation_config.decode_loop = loop
    return plain, target.generate(ids, assistant_model=drafter, **options)


def fixed(kind, target, mask, budget=0):
    def make(texts):
        drafter = batch_oracle(kind, target, texts, mask, budget)
        drafter.generation_config.draft_schedule = "fixed"
        return drafter

    return make


# The last position is read for the token after it.
@pytest.mark.parametrize("column", [LONGEST - 2, LONGEST, LONGEST + 1])
@pytest.mark.parametrize("name", TABLES)
def test_a_draft_ends_where_a_table_of_positions_does(name, column):
    target, given = with_a_table(name), ragged_prompts((8,))
    make = fixed("pard", target, given[1])
    plain, drafted = beyond_positions(target, given, make, stopping_criteria=ends_at(column))
    assert plain.shape[1] == column
    assert torch.equal(drafted, plain)


@pytest.mark.parametrize("name", TABLES)
def test_so_it_does_in_the_stock_loop(name):
    """That one asks a criterion once a round: the last one comes to the criterion's column and no further."""
    target, given = with_a_table(name), ragged_prompts((8,))
    make = fixed("pard", target, given[1])
    assert torch.equal(*beyond_positions(target, given, make, "stock", stopping_criteria=ends_at(LONGEST + 1)))


@pytest.mark.parametrize(
    ("models", "shape", "column"),
    every_two_meet(
        product(["gpt2", "opt"], ["pard", "dflash", "dart"]),
        product([0, 8], [(8,), (8, 6, 8)]),
        [LONGEST, LONGEST + 1],
    ),
)
def test_so_do_trees_and_drafts_of_batches(models, shape, column):
    (name, kind), (budget, lengths) = models, shape
    target, given = with_a_table(name), ragged_prompts(lengths)
    make = fixed(kind, target, given[1], budget)
    assert torch.equal(*beyond_positions(target, given, make, stopping_criteria=ends_at(column)))


@pytest.mark.parametrize("lengths", [(8,), (8, 6)])
@pytest.mark.parametrize("stop", ["criterion", "end token"])
def test_compiled_calls_that_may_outgrow_a_table_end_as_ever(stop, lengths):
    target, given = with_a_table("gpt2"), ragged_prompts(lengths)
    options = {"stopping_criteria": ends_at(LONGEST + 1)}
    if stop == "end token":
        text = target.generate(given[0], attention_mask=given[1], max_length=LONGEST, do_sample=False)
        options = {"eos_token_id": text[:, -1].tolist()}
    compile_config = CompileConfig(backend="eager", mode=None, fullgraph=False)
    options |= {"cache_implementation": "static", "compile_config": compile_config}
    assert torch.equal(*beyond_positions(target, given, fixed("dflash", target, given[1]), **options))


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("lengths", [(8,), (8, 6)])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_text_that_goes_on_after_the_last_position_fails_as_in_plain_generate(name, lengths, budget):
    target, (ids, mask) = with_a_table(name), ragged_prompts(lengths)
    options = {"attention_mask": mask, "do_sample": False, "max_length": 2 * LONGEST}
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.tree_budget, drafter.generation_config.draft_schedule = budget, "fixed"
    seen = []

    def note(text, scores, **kwargs):
        seen.append(text.shape[1])
        return torch.zeros(len(text), dtype=torch.bool)

    for assistant in ({}, {"assistant_model": drafter}):
        with pytest.raises(IndexError):
            target.generate(ids, stopping_criteria=[note], **options, **assistant)
        assert seen.pop() == LONGEST + 1


def test_rotary_embeddings_and_computed_tables_have_no_end():
    assert num_positions(tiny_target("llama").config) is None
    assert num_positions(XGLMConfig()) is None
    target, given = tiny_target("llama", max_position_embeddings=LONGEST), ragged_prompts((8,))
    texts = []

    def make(text):
        drafter = fixed("pard", target, given[1])(text)
        texts.append(drafter)
        return drafter

    assert torch.equal(*beyond_positions(target, given, make))
    assert texts[0].last_stats.drafted_per_round[-3] == 4
