"""Packed weights with the compiler that users get. A file of its own: it takes a while."""

import pytest
import torch
from peft import LoraConfig
from torch._dynamo.utils import counters

from compiled_cases import ONE_LAYER, assert_same, oracle, static, texts_of
from hf_pardraft.generation.packing import packed_weights
from tiny_models import batch_of, tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch, packed_without_trials):
    monkeypatch.setattr(packed_weights, "FEWEST_ELEMENTS", 1)


def packed_of(model) -> list[str]:
    """Names of the parameters of which there is a packed copy."""
    return [name for name, value in model.named_parameters() if packed_weights.is_packed(value, False)]


def linear_layers(model) -> list[str]:
    return [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def write_behind_its_back(model):
    for name in linear_layers(model):
        model.get_parameter(name).data.mul_(-1.5)


def train_a_step(model):
    parameters = [model.get_parameter(name) for name in linear_layers(model)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) / 10
    optimizer.step()


def test_the_text_is_that_of_the_weights_as_they_are_now():
    target, batch = tiny_target("llama", num_hidden_layers=1, tie_word_embeddings=False), batch_of(6, 3)
    drafter = tiny_drafter("pard", target, num_hidden_layers=1)
    assert_same(target, batch, drafter)
    assert packed_of(target) == linear_layers(target)
    assert set(packed_of(drafter)) == {*linear_layers(drafter)}
    counters.clear()
    before = texts_of(target, batch)
    for change in (write_behind_its_back, train_a_step):
        change(target)
        assert_same(target, batch, drafter)
        after = texts_of(target, batch)
        assert not all(map(torch.equal, after, before))
        before = after
        # A drafter of other weights makes other drafts of the same text.
        change(drafter)
        assert_same(target, batch, drafter)
    assert not counters["recompiles"]
    target.add_adapter(LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False))
    assert_same(target, batch, drafter)
    assert not all(map(torch.equal, texts_of(target, batch), before))


def test_sampled_text_is_that_of_plain_generate():
    """From drafts of a part of the vocabulary, too."""
    target, batch = tiny_target("llama", num_hidden_layers=1), batch_of(6, 3)
    drafter = oracle("pard", target, batch, **ONE_LAYER["pard"])
    ids = [*range(0, 64, 2)]
    drafter.set_draft_vocabulary(ids)
    options = {"do_sample": True, "max_new_tokens": 20}
    torch.manual_seed(3)
    expected = target.generate(**batch, **options)
    torch.manual_seed(3)
    text = static(target, batch["input_ids"], drafter, attention_mask=batch["attention_mask"], **options)
    assert torch.equal(text, expected)
    assert {token for proposal in drafter.last_stats.proposals for token in proposal.tokens} <= {*ids}
    assert packed_of(target)
    assert packed_of(drafter)
