"""The same calls with eager and with compiled rounds."""

import time
from functools import partial

import torch

from hf_pardraft.generation.compiled import decoder as compiled_decoder
from tiny_models import make_lasting_oracle, tiny_drafter

RATES = [0.7, 0.6, 0.6, 0.5]
LONGEST = 20
# Dynamo takes some half a second for each layer, and what is seen of one is seen of two.
ONE_LAYER = {"pard": {"num_hidden_layers": 1}, "dflash": {"num_layers": 1}, "dart": {}}
GREEDY = {"do_sample": False, "max_new_tokens": 12}


def leave_uncompiled(monkeypatch) -> list[str]:
    """Compile nothing; returns where the names of the steps that run are noted."""
    names = []

    def uncompiled(step, **options):
        def noted(*arguments):
            names.append(step.__name__)
            return step(*arguments)

        return noted

    monkeypatch.setattr(torch, "compile", uncompiled)
    return names


def texts_of(target, batch, longest: int = LONGEST) -> list[torch.LongTensor]:
    """What the target writes greedily, item by item and without padding."""
    out = target.generate(**batch, do_sample=False, max_new_tokens=longest)
    return [item[int((mask == 0).sum()) :] for item, mask in zip(out, batch["attention_mask"], strict=True)]


_known: dict[tuple, list[torch.LongTensor]] = {}


def known_texts(target, batch, longest: int) -> list[torch.LongTensor]:
    """As [`texts_of`], for an oracle, which may be wrong: found once for all targets that look alike."""
    weights = tuple(weight.sum().item() for weight in target.parameters())
    prompts = (batch["input_ids"].tolist(), batch["attention_mask"].tolist())
    key = (str(target.config), str(target.generation_config), weights, str(prompts), longest)
    if key not in _known:
        _known[key] = texts_of(target, batch, longest)
    return _known[key]


def oracle(kind, target, batch, rates=RATES, runner_up=0.7, settings=None, longest=LONGEST, **overrides):
    """A drafter that knows some of the greedy text, and whose proposals are recorded."""
    drafter = tiny_drafter(kind, target, depth=len(rates), **overrides)
    for name, value in {"record_drafts": True, **(settings or {})}.items():
        setattr(drafter.generation_config, name, value)
    return make_lasting_oracle(drafter, known_texts(target, batch, longest), rates, runner_up)


def static(target, ids, drafter, config=None, **options):
    """A call with compiled rounds, of prompts of one length unless a mask says otherwise."""
    return target.generate(
        ids,
        attention_mask=options.pop("attention_mask", torch.ones_like(ids)),
        assistant_model=drafter,
        cache_implementation="static",
        compile_config=config,
        **{**GREEDY, **options},
    )


def eager_and_static(target, batch, drafter, **options):
    """The same call twice, and how it went."""
    results = []
    for how in ({}, {"cache_implementation": "static"}):
        torch.manual_seed(0)
        options = {"max_new_tokens": LONGEST, "do_sample": False, **options}
        out = target.generate(**batch, assistant_model=drafter, **options, **how)
        results.append((out, drafter.last_stats))
    return results


def assert_same(target, batch, drafter, **options) -> None:
    """Assert that text and rounds are the same."""
    (eager, eager_stats), (static, static_stats) = eager_and_static(target, batch, drafter, **options)
    assert torch.equal(static, eager)
    assert_same_stats(static_stats, eager_stats)


def assert_same_stats(static, eager) -> None:
    for name in ("rounds", "tokens_per_round", "drafted_per_round", "accepted_per_round", "proposals"):
        assert getattr(static, name) == getattr(eager, name), name


def settle(monkeypatch, **attributes):
    """Attributes of all compiled decoding, each worked out from it; returns the list that they are noted in."""
    original, decodings = compiled_decoder.CompiledDecoding.__init__, []

    def settled(self, *arguments, **options):
        original(self, *arguments, **options)
        for name, value in attributes.items():
            setattr(self, name, value(self))
        decodings.append(self)

    monkeypatch.setattr(compiled_decoder.CompiledDecoding, "__init__", settled)
    return decodings


HOUR = 3600.0


def compile_slowly(monkeypatch) -> None:
    """In the place of torch.compile: what it returns is the step itself, whose first call takes an hour of all clocks."""
    hours: list[float] = []

    def compile_in_an_hour(step, **options):
        def compiled(*arguments, **named):
            if not known:
                known.append(step)
                hours.append(HOUR)
            return step(*arguments, **named)

        known = []
        return compiled

    monkeypatch.setattr(torch, "compile", compile_in_an_hour)
    for clock in (time.perf_counter, time.thread_time):
        monkeypatch.setattr(time, clock.__name__, partial(lambda clock: clock() + sum(hours), clock))
