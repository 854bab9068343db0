"""Training with a draft vocabulary: which tokens it is, what its head learns, and that a run goes on with the same."""

import json
import math

import pytest
import torch
from datasets import Dataset

from hf_pardraft import AutoDrafter, DartDrafter
from hf_pardraft.training.losses.scoring import PositionScorer
from hf_pardraft.training.vocabulary import LearnedRows, of_own_rows, set_frequent_vocabulary
from tiny_models import tiny_drafter, tiny_target
from training.tiny_training import losses, trainer_for, written_text

KINDS = ["pard", "pard2", "dflash", "dflare", "dart"]
ROWS = [
    {"input_ids": [9, 9, 9, 5, 7, 5], "labels": [-100, -100, -100, 5, 7, 5]},
    {"input_ids": [9, 7, 30], "labels": [-100, 7, 30]},
]


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def text(target):
    return written_text(target)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "ids"), [(1, [5]), (3, [5, 7, 30]), (5, [0, 1, 5, 7, 30])])
def test_the_tokens_are_those_that_are_learned_most_often(kind, size, ids, target):
    """What stands in prompts doesn't count, and of tokens that occur equally often the lower ids are taken."""
    drafter = tiny_drafter(kind, target)
    set_frequent_vocabulary(drafter, size, Dataset.from_list(ROWS))
    assert drafter.draft_token_ids.tolist() == ids


def test_a_dart_drafter_chooses_among_the_rows_that_it_has(target):
    drafter = DartDrafter.for_target(target, draft_token_ids=[2, 7, 30, 40], draft_length=3)
    set_frequent_vocabulary(drafter, 3, ROWS)
    assert drafter.draft_token_ids.tolist() == [2, 7, 30]
    with pytest.raises(ValueError, match=r"draft_vocab_size must be in \[1, 3\], .* got 4"):
        set_frequent_vocabulary(drafter, 4, ROWS)


@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_a_size_that_can_t_be_is_refused_before_anything_is_trained(kind, target, text, tmp_path):
    with pytest.raises(ValueError, match=r"draft_vocab_size must be in \[1, 64\], .* got 65"):
        trainer_for(kind, target, text, tmp_path, draft_vocab_size=65)
    with pytest.raises(ValueError, match="draft_vocab_size must be at least 1"):
        trainer_for(kind, target, text, tmp_path, draft_vocab_size=0)
    with pytest.raises(ValueError, match="a stream can't be read twice"):
        trainer_for(kind, target, text.to_iterable_dataset(), tmp_path, draft_vocab_size=8)


@pytest.mark.parametrize("kind", KINDS)
def test_training_learns_to_propose_them(kind, target, text, tmp_path):
    arguments = {"draft_vocab_size": 24, "max_steps": 40, "tau_prompts": 2, "tau_new_tokens": 16}
    trainer = trainer_for(kind, target, text, tmp_path / "run", **arguments)
    ids = trainer.drafter.draft_token_ids.tolist()
    assert len(ids) == 24
    trainer.train()
    history = losses(trainer)
    assert all(map(math.isfinite, history))
    assert sum(history[-5:]) < 0.7 * sum(history[:5])
    scores = trainer.evaluate()
    assert scores["eval_tau"] >= 1
    trainer.save_model(str(tmp_path / "saved"))
    assert AutoDrafter.from_pretrained(tmp_path / "saved").draft_token_ids.tolist() == ids


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
def test_a_run_goes_on_with_the_same_tokens_and_losses(kind, target, text, tmp_path):
    settings = {"draft_vocab_size": 20, "max_steps": 6}
    whole = trainer_for(kind, target, text, tmp_path / "whole", **settings)
    whole.train()
    saving = {**settings, "save_strategy": "steps", "save_steps": 3}
    first = trainer_for(kind, target, text, tmp_path / "run", **saving)
    first.train()
    again = trainer_for(kind, target, text, tmp_path / "run", **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert torch.equal(again.drafter.draft_token_ids, whole.drafter.draft_token_ids)
    assert losses(again)[-3:] == pytest.approx(losses(whole)[-3:], rel=1e-5)
    other = trainer_for(kind, target, text, tmp_path / "run", **{**saving, "draft_vocab_size": 21})
    with pytest.raises(ValueError, match=r"draft_vocab_size 20 .now 21."):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    facts = json.loads((tmp_path / "run" / "checkpoint-3" / "config.json").read_text())
    assert facts["draft_vocab_size"] == 20


@pytest.mark.parametrize("chunk_size", [3, 512])
def test_rows_learn_what_a_whole_head_would_that_gives_the_others_no_chance(chunk_size):
    """Gradients of head and states, against logits of -inf in float64."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([1, 4, 6, 7, 11])
    weight, states = torch.randn(13, 8, generator=generator).double(), torch.randn(10, 8, generator=generator).double()
    labels = torch.tensor([0, 4, 2, 1, 3, 0, 0, 2, 4, 1])
    gradients = []
    for way in ("rows", "whole"):
        head = torch.nn.Linear(8, 13, bias=False).double()
        head.weight.data.copy_(weight)
        inputs = states.clone().requires_grad_()
        if way == "rows":
            scores = PositionScorer(labels, chunk_size=chunk_size)(LearnedRows(head, ids), inputs)["log_probs"]
        else:
            is_known = torch.zeros(13, dtype=torch.bool).index_fill(0, ids, True)
            logits = head(inputs).masked_fill(~is_known, -torch.inf)
            scores = logits.log_softmax(-1).gather(1, ids[labels, None])[:, 0]
        (scores * torch.arange(1, 11)).sum().backward()
        gradients.append((scores.detach(), inputs.grad, head.weight.grad))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    others = [token for token in range(13) if token not in ids]
    assert not gradients[0][2][others].any()


def test_a_head_that_does_more_than_its_rows_learns_as_a_whole(target):
    drafter = tiny_drafter("pard", target)
    drafter.set_draft_vocabulary([3, 5, 8])
    states, head = torch.randn(4, 32), drafter.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, inputs, output: output.neg())
    found = of_own_rows(drafter, lambda rows, states: rows(states))(head, states)
    assert torch.equal(found, head(states)[..., [3, 5, 8]])
    handle.remove()
    found.sum().backward()
    assert head.weight.grad.any()


def test_padding_and_first_tokens_do_not_count_since_nothing_is_learned_there(target):
    padded = {"input_ids": [9, 41, 42] + [62] * 9, "attention_mask": [1] * 3 + [0] * 9}
    packed = {"input_ids": [9, 41, 9, 41], "labels": [9, 41, 9, 41], "document_ids": [0, 0, 1, 1]}
    drafter = tiny_drafter("dflash", target)
    set_frequent_vocabulary(drafter, 2, [padded, padded, packed])
    assert drafter.draft_token_ids.tolist() == [41, 42]


@pytest.mark.parametrize(
    ("kind", "before", "after"), [("pard", 20, 24), ("pard", None, 20), ("dflash", 20, None), ("dart", 20, 24)]
)
def test_a_vocabulary_does_not_change_on_the_way(kind, before, after, target, text, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    trainer_for(kind, target, text, tmp_path, draft_vocab_size=before, max_steps=1, **options).train()
    trainer = trainer_for(
        kind, target, text, tmp_path, draft_vocab_size=after, max_steps=2, resume_changed=True, **options
    )
    with pytest.raises(ValueError, match=r"is of a drafter that proposes \S+ tokens .* can't change on the way"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_trainer_that_is_refused_leaves_the_vocabulary_as_it_was(target, text, tmp_path):
    drafter = tiny_drafter("dflash", target)
    drafter.set_draft_vocabulary([3, 5, 8], target)
    rows = drafter.lm_head.weight.clone()
    options = {"draft_vocab_size": 20, "features_folder": str(tmp_path / "missing")}
    with pytest.raises((ValueError, OSError)):
        trainer_for("dflash", target, text, tmp_path, drafter=drafter, **options)
    assert drafter.draft_token_ids.tolist() == [3, 5, 8]
    assert torch.equal(drafter.lm_head.weight, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_that_was_set_in_inference_mode_can_be_trained(kind, target, text, tmp_path):
    drafter = tiny_drafter(kind, target)
    with torch.inference_mode():
        drafter.set_draft_vocabulary([3, 5, 8, 13, 21])
    trainer = trainer_for(kind, target, text, tmp_path, drafter=drafter, max_steps=1)
    trainer.train()
    assert math.isfinite(losses(trainer)[0])
    assert drafter.draft_token_ids.tolist() == [3, 5, 8, 13, 21]
