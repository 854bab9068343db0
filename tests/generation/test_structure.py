"""What a model is made of is what torch and transformers say, whenever one asks."""

import gc
import threading

import numpy
import pytest
import torch
from torch import nn
from transformers import Gemma3TextConfig, Qwen3Config
from transformers.cache_utils import get_layer_types_and_kwargs

from hf_pardraft.generation.packing.replaced_forwards import has_replaced_forwards
from hf_pardraft.generation.target_side import structure
from hf_pardraft.generation.target_side.structure import (
    hooks_of,
    layer_types_of,
    modules_of,
    parameters_of,
    text_config_of,
    walking_once,
    windows_of,
)
from hf_pardraft.models.masks import attention_windows
from tiny_models import tiny_target


def test_modules_are_those_of_torch_once_each():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": nn.Sequential(nn.Sequential(shared), nn.GELU())})
    model.register_module("none", None)
    found = modules_of(model)
    assert len(found) == len(set(found))
    assert set(found) == set(model.modules())


def test_within_a_call_a_model_is_walked_once_and_after_it_anew():
    model = nn.Sequential(nn.Linear(2, 2))
    with walking_once():
        found = modules_of(model)
        assert modules_of(model) is found
        with walking_once():
            # A call within, of a processor say, may have changed the model before.
            model.append(nn.ReLU())
            assert len(modules_of(model)) == len(found) + 1
        assert modules_of(model) is found
    assert set(modules_of(model)) == set(model.modules())


def test_hooks_and_replaced_forwards_are_looked_for_once_in_a_call_and_after_it_anew():
    model = nn.Sequential(nn.Linear(2, 2))
    with walking_once():
        assert hooks_of(model) == []
        assert not has_replaced_forwards(model)
    model[0].register_forward_pre_hook(print)
    model.register_forward_hook(repr)
    model[0].forward = print
    with walking_once():
        assert {*hooks_of(model)} == {print, repr}
        assert hooks_of(model) is hooks_of(model)
        assert has_replaced_forwards(model)
    del model[0].forward
    with walking_once():
        assert not has_replaced_forwards(model)


def test_the_config_of_a_targets_text_is_the_one_that_it_has_in_each_call():
    target = tiny_target("llama")
    with walking_once():
        assert text_config_of(target) is target.config
        target.config = Qwen3Config()
        assert text_config_of(target) is target.config
    assert text_config_of(target) is target.config


def test_parameters_of_several_models_are_those_of_torch_once_each():
    first, second = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)), nn.Sequential(nn.Embedding(2, 2))
    first[1].weight = second[0].weight
    found = parameters_of(first, second)
    assert {*map(id, found)} == {id(parameter) for model in (first, second) for parameter in model.parameters()}
    assert len(found) == 3


@pytest.mark.parametrize("config", [Qwen3Config(num_hidden_layers=3), Gemma3TextConfig(num_hidden_layers=7)])
def test_layer_types_are_those_of_transformers(config):
    assert layer_types_of(config) == get_layer_types_and_kwargs(config)
    assert layer_types_of(config) is layer_types_of(config)


@pytest.mark.parametrize("config", [Qwen3Config(num_hidden_layers=3), Gemma3TextConfig(num_hidden_layers=7)])
def test_windows_are_those_of_transformers(config):
    assert windows_of(config) == attention_windows(config)


def test_within_a_call_a_config_is_compared_once_and_after_it_anew(monkeypatch):
    config, compared = Gemma3TextConfig(num_hidden_layers=6, sliding_window=8), []
    real = structure.plain_values
    monkeypatch.setattr(structure, "plain_values", lambda *args: compared.append(args) or real(*args))
    with walking_once():
        first = windows_of(config)
        num_compared = len(compared)
        assert windows_of(config) == first
        assert len(compared) == num_compared
        # Another config that came to the place of one that is gone would be known by its own.
        assert layer_types_of(Gemma3TextConfig(num_hidden_layers=2)) != layer_types_of(config)
    config.sliding_window = 4
    assert windows_of(config)["sliding_attention"] == 4


def test_a_changed_config_is_looked_at_again():
    config = Gemma3TextConfig(num_hidden_layers=6, sliding_window=8)
    assert layer_types_of(config)[1][0] == {"sliding_window": 8}
    config.sliding_window = 4
    assert layer_types_of(config)[1][0] == {"sliding_window": 4}
    config.layer_types[0] = "full_attention"
    assert layer_types_of(config) == get_layer_types_and_kwargs(config)
    assert layer_types_of(config)[0][0] == "full_attention"


def test_configs_that_are_gone_are_forgotten():
    config = Qwen3Config(num_hidden_layers=1)
    layer_types_of(config)
    key = id(config)
    assert key in structure._known
    del config
    gc.collect()
    assert key not in structure._known


@pytest.mark.parametrize("value", [torch.ones(2), numpy.ones(2), nn.Linear(1, 1), threading.Lock()])
def test_a_config_may_hold_what_can_not_be_compared_or_copied(value):
    config = Gemma3TextConfig(num_hidden_layers=3, sliding_window=8)
    config.class_weights, config.more = value, [{"a": value}]
    assert layer_types_of(config) is layer_types_of(config)
    config.sliding_window = 4
    assert layer_types_of(config) == get_layer_types_and_kwargs(config)


def test_a_config_may_hold_a_list_that_holds_itself():
    config = Qwen3Config(num_hidden_layers=1)
    config.loop = []
    config.loop.append(config.loop)
    assert layer_types_of(config) is layer_types_of(config)
