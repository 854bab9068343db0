"""The host waits for the device once a round, whatever the round accepts."""

import sys

import pytest
import torch

from hf_pardraft import NgramModel
from hf_pardraft.generation.decoder import SpeculativeDecoding
from tiny_models import make_oracle, random_prompt, tiny_drafter, tiny_target

WAITING = ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "numpy")


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.5, "top_p": 0.9}])
@pytest.mark.parametrize("kind", ["pard", "dflash", "dart", "pard2"])
@pytest.mark.parametrize("proposal", ["chain", "tree", "tree and n-grams"])
def test_a_round_synchronises_once(monkeypatch, kind, sampling, proposal):
    target, prompt = tiny_target("llama"), random_prompt(6)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24}
    text = target.generate(prompt, do_sample=False, **options)
    drafter = make_oracle(tiny_drafter(kind, target), text[0], rates=[0.8] * 4)
    drafter.generation_config.tree_budget = 0 if proposal == "chain" else 12
    drafter.ngram = NgramModel.from_token_stream(text, vocab_size=64, order=4) if proposal.endswith("n-grams") else None
    waits, per_round = [], []

    def counted(name, original):
        def method(self, *args, **kwargs):
            # transformers' and the oracle's own look-ups are not the loop's.
            caller = sys._getframe(1).f_globals["__name__"]
            if caller.startswith("hf_pardraft"):
                waits.append(name)
            return original(self, *args, **kwargs)

        return method

    for name in WAITING:
        monkeypatch.setattr(
            torch.Tensor, name, counted(name, vars(torch.Tensor).get(name, getattr(torch.Tensor, name)))
        )
    one_round = SpeculativeDecoding.round

    def round_(self):
        before = len(waits)
        finished = one_round(self)
        per_round.append(waits[before:])
        return finished

    monkeypatch.setattr(SpeculativeDecoding, "round", round_)
    target.generate(prompt, assistant_model=drafter, **options, **sampling)
    assert len(per_round) == drafter.last_stats.rounds > 3
    assert all(names == ["tolist"] for names in per_round)
