"""Setting a draft vocabulary: what is refused, which rows are gathered, and when they are gathered again."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from hf_pardraft import AutoDrafter, DartDrafter, PardDrafter
from hf_pardraft.pairing import gathered_rows
from hf_pardraft.pairing.gathered_rows import ChosenColumns
from tiny_models import random_prompt, tiny_drafter, tiny_target

KINDS = ["pard", "pard2", "dflash", "dflare", "dart"]
IDS = [2, 3, 5, 8, 13, 21, 34, 55]


@pytest.fixture
def gathered(monkeypatch):
    """How often rows were gathered, as a list that grows."""
    calls, gather = [], gathered_rows.gathered_rows
    monkeypatch.setattr(gathered_rows, "gathered_rows", lambda *args: calls.append(args) or gather(*args))
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([], "none"),
        (torch.empty(0), "none"),
        ([-1, 3], "from -1 to 3"),
        ([3, 64], "from 3 to 64"),
        ([3, 5, 3], "3 ids, 2 of them distinct"),
        ([1.5, 2.0], "float32: pass whole numbers"),
        ([True, False], "bool: pass whole numbers"),
        (torch.ones(64, dtype=torch.bool), "bool: pass whole numbers"),
        (torch.zeros(2, 2, dtype=torch.long), r"a tensor of shape \(2, 2\)"),
        (torch.tensor(7), r"a tensor of shape \(\)"),
        ("common", "'common': pass a list or a tensor"),
        (7, "7: pass a list or a tensor"),
        ([[1], [2, 3]], "pass a list or a tensor"),
        ([1 << 70], "pass a list or a tensor"),
    ],
)
def test_what_is_no_vocabulary_is_refused_and_changes_nothing(kind, ids, found):
    drafter = tiny_drafter(kind, tiny_target())
    drafter.set_draft_vocabulary(IDS)
    with pytest.raises(ValueError, match=rf"a draft vocabulary must be .* tokens in \[0, 64\), got .*{found}"):
        drafter.set_draft_vocabulary(ids)
    assert drafter.draft_token_ids.tolist() == IDS
    assert drafter.config.draft_vocab_size == len(IDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "ids",
    [
        list(reversed(IDS)),
        torch.tensor(IDS, dtype=torch.int32),
        range(2, 60, 7),
        {5, 3},
        np.array(IDS, dtype=np.int16),
        np.array(IDS, dtype=np.uint64),
    ],
)
def test_ids_may_come_in_any_order_and_form(kind, ids):
    drafter = tiny_drafter(kind, tiny_target())
    drafter.set_draft_vocabulary(ids)
    assert drafter.draft_token_ids.tolist() == sorted(map(int, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_are_no_draft_vocabulary(kind):
    drafter = tiny_drafter(kind, tiny_target())
    names = drafter.state_dict().keys()
    drafter.set_draft_vocabulary(range(64))
    assert drafter.draft_token_ids is None
    assert drafter.state_dict().keys() == names


def test_a_drafter_that_waits_for_its_target_is_told_to_meet_it():
    target = tiny_target()
    drafter = tiny_drafter("dflash", target)
    drafter.config.vocab_size = 0
    with pytest.raises(ValueError, match=r"call drafter.check_target\(target\) first"):
        drafter.set_draft_vocabulary(IDS)
    drafter.check_target(target)
    drafter.set_draft_vocabulary(IDS)
    assert drafter.draft_token_ids.tolist() == IDS


@pytest.mark.parametrize("kind", ["pard", "dart"])
def test_rows_of_a_target_are_for_those_that_borrow_them(kind):
    target = tiny_target()
    drafter = tiny_drafter(kind, target)
    with pytest.raises(ValueError, match="has a head of its own, whose rows are taken: leave target out"):
        drafter.set_draft_vocabulary(IDS, target)


def head_for(drafter, target):
    """What scores drafts, and the head whose rows they are."""
    return drafter.new_draft_state(target).lm_head, (
        drafter if drafter.config.drafter_kind == "pard" else target
    ).get_output_embeddings()


@pytest.mark.parametrize("kind", ["pard", "pard2", "dflash", "dflare"])
def test_rows_are_gathered_once(kind, gathered):
    target = tiny_target()
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(IDS)
    for _ in range(3):
        target.generate(random_prompt(5), assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert len(gathered) == 1
    scoring, head = head_for(drafter, target)
    assert torch.equal(scoring.weight, head.weight[IDS])
    assert not scoring.weight.requires_grad
    assert scoring.weight.data_ptr() != head.weight.data_ptr()


CHANGES = {
    "an optimiser's step": lambda head: head.weight.add_(1),
    "a merged adapter": lambda head: head.weight.data.add_(1),
    "loaded weights": lambda head: head.load_state_dict({"weight": head.weight + 1}),
    "other weights": lambda head: setattr(head, "weight", nn.Parameter(head.weight + 1)),
    "another dtype": lambda head: head.to(torch.float64),
    "one row": lambda head: head.weight[IDS[3]].add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["pard", "dflash"])
@torch.no_grad()
def test_a_head_that_has_changed_is_noticed(kind, change, gathered):
    target = tiny_target()
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(IDS)
    _, head = head_for(drafter, target)
    CHANGES[change](head)
    scoring, head = head_for(drafter, target)
    # Rows are kept in the smaller dtype of head and drafter.
    assert scoring.weight.dtype == torch.float32
    assert torch.equal(scoring.weight, head.weight[IDS].float())
    assert len(gathered) == 2


@pytest.mark.parametrize("kind", ["pard", "dflash", "dflare"])
@torch.no_grad()
def test_rows_are_gathered_in_the_smaller_dtype_of_head_and_drafter(kind, gathered):
    target = tiny_target()
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(IDS)
    prompt = random_prompt(5)
    text = target.generate(prompt, max_new_tokens=12, do_sample=False)
    drafter.to(torch.bfloat16)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False), text)
    scoring, head = head_for(drafter, target)
    assert scoring.weight.dtype == torch.bfloat16
    assert torch.equal(scoring.weight, head.weight[IDS].bfloat16())
    assert len(gathered) == 1
    # A drafter that is larger than its target.
    target.to(torch.bfloat16)
    drafter.to(torch.float32)
    target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)
    scoring, head = head_for(drafter, target)
    assert scoring.weight.dtype == head.weight.dtype
    assert torch.equal(scoring.weight, head.weight[IDS])
    assert len(gathered) == 2


def test_another_target_or_vocabulary_is_noticed(gathered):
    targets = [tiny_target(seed=0), tiny_target(seed=1)]
    drafter = tiny_drafter("dflash", targets[0])
    for ids in (IDS, [1, *IDS[1:]]):
        drafter.set_draft_vocabulary(ids)
        for target in targets:
            scoring, head = head_for(drafter, target)
            assert torch.equal(scoring.weight, head.weight[ids])
    assert len(gathered) == 4


def test_copies_of_a_drafter_have_vocabularies_of_their_own():
    target = tiny_target()
    drafter = tiny_drafter("dflash", target)
    drafter.set_draft_vocabulary(IDS)
    other = copy.deepcopy(drafter)
    other.set_draft_vocabulary(IDS[:4])
    assert [head_for(each, target)[0].out_features for each in (drafter, other)] == [8, 4]


def hooked(head):
    head.register_forward_hook(lambda module, inputs, output: output.neg())


def patched(head):
    own = head.forward
    head.forward = lambda states: own(states).neg()


class Scaled(nn.Linear):
    def forward(self, states):
        return super().forward(states).neg()


def derived(head):
    head.__class__ = Scaled


@pytest.mark.parametrize("change", [hooked, patched, derived])
@torch.no_grad()
def test_a_head_that_does_more_than_its_rows_is_run_whole(change, gathered):
    target = tiny_target()
    drafter = tiny_drafter("dflash", target)
    drafter.set_draft_vocabulary(IDS)
    change(target.lm_head)
    scoring, head = head_for(drafter, target)
    states = torch.randn(1, 3, 32)
    assert isinstance(scoring, ChosenColumns)
    assert torch.equal(scoring(states), head(states)[..., IDS])
    assert not gathered
    with pytest.raises(ValueError, match="so a drafter can't have rows of it: leave target out"):
        drafter.set_draft_vocabulary(IDS, target)
    assert drafter.draft_token_ids.tolist() == IDS


@torch.no_grad()
def test_a_bias_is_gathered_too():
    target = tiny_target()
    drafter = tiny_drafter("dflash", target)
    drafter.set_draft_vocabulary(IDS)
    target.lm_head.bias = nn.Parameter(torch.arange(64.0))
    # Whichever of weight and bias comes first, as after pruning, and where the bias is no parameter.
    for change in (None, prune_for_good, hold_bias_as_buffer):
        if change is not None:
            change(target.lm_head)
        scoring, head = head_for(drafter, target)
        states = torch.randn(1, 3, 32)
        torch.testing.assert_close(scoring(states), head(states)[..., IDS])


def prune_for_good(head):
    prune.l1_unstructured(head, "weight", amount=0.1)
    prune.remove(head, "weight")
    assert [name for name, _ in head.named_parameters()] == ["bias", "weight"]


def hold_bias_as_buffer(head):
    bias = head.bias.detach()
    del head.bias
    head.register_buffer("bias", bias)


def test_rows_of_a_head_are_usable_in_autograd_after_a_call_in_inference_mode():
    target = tiny_target()
    drafter = tiny_drafter("dflash", target)
    drafter.set_draft_vocabulary(IDS)
    with torch.inference_mode():
        scoring, _ = head_for(drafter, target)
    states = torch.randn(2, 32, requires_grad=True)
    scoring(states).sum().backward()
    assert states.grad is not None


def test_a_dart_drafter_gets_its_rows_back():
    drafter = DartDrafter.for_target(tiny_target(), draft_token_ids=range(0, 60, 2), draft_length=3)
    whole, known = drafter.lm_head.weight.clone(), drafter.draft_token_ids.tolist()
    for ids in ([4, 8, 20], [8, 10], [58]):
        drafter.set_draft_vocabulary(ids)
        assert drafter.config.draft_vocab_size == len(ids)
        assert torch.equal(drafter.lm_head.weight, whole[[known.index(i) for i in ids]])
    with torch.no_grad():
        # What was learned meanwhile.
        drafter.lm_head.weight.fill_(7)
    drafter.set_draft_vocabulary(None)
    assert drafter.draft_token_ids.tolist() == known
    whole[known.index(58)] = 7
    assert torch.equal(drafter.lm_head.weight, whole)
    assert drafter.lm_head.weight.requires_grad


def test_a_dart_drafter_does_not_know_tokens_that_its_head_never_had():
    drafter = DartDrafter.for_target(tiny_target(), draft_token_ids=range(0, 60, 2), draft_length=3)
    with pytest.raises(ValueError, match=r"has rows of 30 tokens, and none of 2 that .*the first is 5"):
        drafter.set_draft_vocabulary([2, 4, 5, 63])
    assert drafter.config.draft_vocab_size == 30


@pytest.mark.parametrize("is_named", [False, True])
def test_a_drafter_made_of_one_with_a_vocabulary_keeps_it(is_named, tmp_path):
    target, base = tiny_target("qwen3"), tiny_drafter("pard", tiny_target("qwen3"))
    base.set_draft_vocabulary(IDS)
    base.save_pretrained(tmp_path / "base")
    made = PardDrafter.from_causal_lm(str(tmp_path / "base") if is_named else base, target=target)
    assert made.draft_token_ids.tolist() == IDS
    made.save_pretrained(tmp_path / "made")
    assert AutoDrafter.from_pretrained(tmp_path / "made").draft_token_ids.tolist() == IDS


def test_a_vocabulary_that_only_the_config_knows_is_refused_before_any_work(tmp_path):
    target = tiny_target("qwen3")
    drafter = tiny_drafter("pard", target)
    drafter.set_draft_vocabulary(IDS)
    copied = type(drafter)(drafter.config)
    copied.load_state_dict(drafter.state_dict())
    with pytest.raises(ValueError, match=r"proposes 8 tokens .* none are named, .* call drafter.set_draft_vocabulary"):
        copied.check_target(target)
    with pytest.raises(ValueError, match="none are named"):
        copied.save_pretrained(tmp_path / "copied")
    assert not (tmp_path / "copied").exists()
    copied.set_draft_vocabulary(IDS)
    copied.save_pretrained(tmp_path / "copied")
    assert AutoDrafter.from_pretrained(tmp_path / "copied").draft_token_ids.tolist() == IDS


@pytest.mark.parametrize(("size", "left"), [(80, IDS), (48, IDS[:-1]), (6, [2, 3, 5])])
def test_a_vocabulary_follows_an_embedding_that_is_resized(size, left, tmp_path):
    drafter = PardDrafter.from_causal_lm(tiny_target("qwen3", seed=1, num_hidden_layers=2), mask_token_id=4)
    drafter.set_draft_vocabulary(IDS)
    drafter.resize_token_embeddings(size)
    assert drafter.draft_token_ids.tolist() == left
    drafter.save_pretrained(tmp_path)
    drafter, target = AutoDrafter.from_pretrained(tmp_path), tiny_target("qwen3", vocab_size=size)
    assert drafter.draft_token_ids.tolist() == left
    prompt = random_prompt(6) % size
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), target.generate(prompt, **options))


def test_where_no_token_of_a_vocabulary_is_left_all_are_proposed():
    drafter = PardDrafter.from_causal_lm(tiny_target("qwen3", seed=1, num_hidden_layers=2), mask_token_id=4)
    drafter.set_draft_vocabulary([40, 41, 42])
    drafter.resize_token_embeddings(40)
    assert drafter.draft_token_ids is None
    assert drafter.config.draft_vocab_size is None
