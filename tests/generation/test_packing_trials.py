"""Packed weights are used where they are faster on this machine, which is found out for each kind of product."""

import random

import pytest
import torch

from hf_pardraft.generation.packing import packed_layers, packed_weights, packing_trials
from hf_pardraft.generation.packing.packing_trials import Trial, is_never_faster, trial_of
from threads import in_threads, torch_threads
from tiny_models import random_prompt, tiny_drafter, tiny_target


class Clock:
    """Products take as long as they are said to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(packing_trials, "time", clock)
    monkeypatch.setattr(packing_trials, "NUM_TRIALS", 3)
    monkeypatch.setattr(packing_trials, "_trials", {})
    return clock


def taking(clock, seconds):
    def product():
        clock.now += seconds
        return torch.tensor(seconds)

    return product


def decide(clock, usual, packed, num_weights=5):
    """Products with weights by turns until the trial is over; which were packed, and how many products it took."""
    trial, copies = Trial(), set()
    for number in range(500):
        if trial.packs is not None:
            return trial, copies, number
        weight = number % num_weights
        made = weight in copies
        # To pack takes long, once.
        product = trial.product(taking(clock, usual), taking(clock, packed if made else 50.0), made)
        if product != usual:
            copies.add(weight)
    raise AssertionError("undecided")


@pytest.mark.parametrize(("usual", "packed"), [(2.0, 1.0), (1.0, 0.88)])
def test_packed_weights_are_chosen_where_they_are_faster(clock, usual, packed):
    trial, *_ = decide(clock, usual, packed)
    assert trial.packs is True


@pytest.mark.parametrize(("usual", "packed"), [(1.0, 2.0), (1.0, 1.0), (1.0, 0.93)])
def test_and_where_they_gain_nothing_they_are_not(clock, usual, packed):
    trial, *_ = decide(clock, usual, packed)
    assert trial.packs is False


def test_two_equal_ways_on_a_noisy_machine_are_no_reason_to_pack(clock, monkeypatch):
    """What bfloat16 without instructions for it is like: a copy would cost a quarter of a gigabyte, and gain nothing."""
    monkeypatch.undo()
    monkeypatch.setattr(packing_trials, "time", clock)
    draws = random.Random(0)
    for _ in range(100):
        trial = Trial()
        while trial.packs is None:
            seconds = draws.lognormvariate(0.0, 0.05)
            trial.product(taking(clock, seconds), taking(clock, seconds), True)
        assert trial.packs is False


@pytest.mark.parametrize("num_weights", [1, 2, 7, 60])
def test_a_trial_is_short_and_packs_few_weights(clock, num_weights):
    _, copies, num_products = decide(clock, 1.0, 2.0, num_weights)
    assert len(copies) <= 1 + 2 * num_products / packing_trials.PRODUCTS_PER_COPY
    assert num_products <= 2 * max(num_weights, packing_trials.PRODUCTS_PER_COPY) + 10


def test_one_interrupted_product_decides_nothing(clock):
    trial = Trial()
    for seconds in (1.0, 900.0, 1.0):
        trial.product(taking(clock, seconds), taking(clock, seconds), False)
    for seconds in (0.5, 0.5, 800.0):
        trial.product(taking(clock, 1.0), taking(clock, seconds), True)
    while trial.packs is None:
        trial.product(taking(clock, 1.0), taking(clock, 0.5), True)
    assert trial.packs


def test_copies_that_are_gone_do_not_leave_a_trial_undecided_for_ever(clock):
    trial = Trial()
    for _ in range(40):
        # Each belongs to a model that is deleted at once.
        trial.product(taking(clock, 1.0), taking(clock, 50.0), False)
    assert trial.packs is None
    for _ in range(10):
        if trial.packs is None:
            trial.product(taking(clock, 1.0), taking(clock, 0.5), True)
    assert trial.packs


def test_products_of_other_shapes_dtypes_and_tokens_are_other_trials(clock):
    weight = torch.empty(8, 6)
    kinds = [
        trial_of(*arguments)
        for arguments in (
            (weight, False, 1),
            (weight, True, 1),
            (weight.bfloat16(), False, 1),
            (weight.t(), False, 1),
            *((weight, False, count) for count in (2, 3, 4, 5, 9, 17, 300)),
        )
    ]
    assert len({*map(id, kinds)}) == len(kinds)
    assert trial_of(torch.empty(8, 6), False, 8) is trial_of(weight, False, 5)
    with torch_threads(torch.get_num_threads() + 1):
        assert trial_of(weight, False, 1) is not kinds[0]


@pytest.fixture
def small_weights_are_packed(clock, monkeypatch):
    monkeypatch.setattr(packed_weights, "FEWEST_ELEMENTS", 64)
    packed_weights._packed.clear()


def write(target, drafter=None):
    ids = random_prompt(6)
    torch.manual_seed(0)
    return target.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)


@pytest.mark.usefixtures("small_weights_are_packed")
@pytest.mark.parametrize("is_faster", [False, True])
def test_a_call_uses_and_keeps_copies_that_pay_and_writes_the_same_text(clock, monkeypatch, is_faster):
    product, usual = packed_weights.packed_product, torch.nn.Linear.forward

    def packed_product(*arguments):
        clock.now += 1.0
        return product(*arguments)

    def forward(layer, tokens):
        clock.now += 2.0 if is_faster else 0.5
        return usual(layer, tokens)

    target = tiny_target("llama")
    drafter, expected = tiny_drafter("dflash", target), write(target)
    with monkeypatch.context() as patch:
        patch.setattr(packed_layers, "packed_product", packed_product)
        patch.setattr(torch.nn.Linear, "forward", forward)
        texts = [write(target, drafter) for _ in range(4)]
    assert all(torch.equal(text, expected) for text in texts)
    weight = target.model.layers[0].mlp.up_proj.weight
    assert packed_weights.is_packed(weight, False) == is_faster
    assert is_never_faster(weight, False) != is_faster


@pytest.mark.usefixtures("small_weights_are_packed")
def test_what_is_never_faster_needs_no_memory(monkeypatch):
    target = tiny_target("llama")
    layers = packed_layers.packable_layers(target)
    monkeypatch.setattr(packed_layers, "free_memory", lambda: 0)
    assert not packed_layers.fit_in_memory(layers)
    for layer in layers:
        trial_of(layer.weight, False, 1).packs = False
    assert packed_layers.fit_in_memory(layers)


@pytest.mark.usefixtures("small_weights_are_packed")
def test_threads_may_try_at_once():
    target = tiny_target("llama")
    drafter, expected = tiny_drafter("pard", target), write(target)
    texts = in_threads(4, lambda: write(target, drafter))
    assert len(texts) == 4
    assert all(torch.equal(text, expected) for text in texts)
