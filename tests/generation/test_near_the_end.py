"""How a call comes to its end: reminders of long texts, and what is drafted where rows have different room."""

import pytest
import torch
from transformers.generation import stopping_criteria

from tiny_models import make_oracle, random_prompt, tiny_drafter, tiny_target

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
