"""Calls run in inference mode where nobody can tell, and nowhere else."""

import functools

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from compiled_cases import leave_uncompiled
from hf_pardraft.generation import inference_mode
from hf_pardraft.generation.scheduling.schedule import Schedule
from hf_pardraft.generation.target_side.reader import TargetReader
from pairwise import every_two_meet
from tiny_models import ragged_prompts, random_prompt, tiny_drafter, tiny_target
from unusual_targets import hybrid_target

KINDS = ("pard", "dflash", "dflare", "dart")
OPTIONS = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture
def modes(monkeypatch):
    """Whether each forward of the target's ran in inference mode."""
    seen, read = [], TargetReader.read

    def noted(self, *arguments, **options):
        seen.append(torch.is_inference_mode_enabled())
        return read(self, *arguments, **options)

    monkeypatch.setattr(TargetReader, "read", noted)
    return seen


WAYS = [{}, {"do_sample": True, "repetition_penalty": 1.2}, {"tree_budget": 8}]


@pytest.mark.parametrize(("kind", "lengths", "options"), every_two_meet(KINDS, [(5,), (5, 3)], WAYS))
def test_a_call_that_returns_the_text_alone_runs_in_it_and_leaves_nothing_of_it_behind(modes, kind, lengths, options):
    target = tiny_target("llama")
    drafter = tiny_drafter(kind, target)
    ids, mask = ragged_prompts(lengths)
    config = GenerationConfig(**{**OPTIONS, **options})
    text = target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
    assert set(modes) == {True}
    assert not text.is_inference()
    for model in (target, drafter):
        assert not any(tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()])
    # What was made once and kept serves a training step.
    text += 0
    target(text, labels=text).loss.backward()
    target.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)


class Keeping(LogitsProcessor, StoppingCriteria):
    """Might keep what it is shown."""

    def __call__(self, input_ids, scores):
        return scores if isinstance(scores, torch.Tensor) else torch.zeros(len(input_ids), dtype=torch.bool)


def hooked(target):
    target.model.layers[0].register_forward_hook(lambda module, given, out: None)


def replaced(target):
    layer = target.model.layers[0]
    layer.forward = layer.forward


def foreign(target):
    norm = type(target.model.norm)
    target.model.norm.__class__ = type("Norm", (norm,), {"__module__": "somebody"})


def subclassed(target):
    class Weight(torch.nn.Parameter):
        pass

    layer = target.model.layers[0].mlp.up_proj
    layer.weight = Weight(layer.weight.data)


def attending_by_itself(target):
    def attend(*arguments, **options):
        return sdpa_attention_forward(*arguments, **options)

    AttentionInterface.register("somebodys", attend)
    AttentionMaskInterface.register("somebodys", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    target.set_attn_implementation("somebodys")


def patching_a_class(target):
    forward = LlamaMLP.forward
    patched.setattr(LlamaMLP, "forward", lambda self, states: forward(self, states))


def patching_a_function(target):
    rotate = modeling_llama.apply_rotary_pos_emb
    patched.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *given, **options: rotate(*given, **options))


def patching_with_no_function(target):
    patched.setattr(LlamaMLP, "forward", functools.partialmethod(LlamaMLP.forward))


def patching_with_what_is_called(target):
    patched.setattr(modeling_llama, "apply_rotary_pos_emb", functools.partial(modeling_llama.apply_rotary_pos_emb))


# Undone after each test.
patched = pytest.MonkeyPatch()


@pytest.mark.parametrize(
    "options",
    [
        {"change": patching_a_class},
        {"change": patching_a_function},
        {"change": patching_with_no_function},
        {"change": patching_with_what_is_called},
        {
            "logits_processor": LogitsProcessorList([SequenceBiasLogitsProcessor([[[5], -9.0]])]),
            "sequence_bias": [[[5], -9.0]],
        },
        {"return_dict_in_generate": True},
        {"past_key_values": DynamicCache},
        {"logits_processor": LogitsProcessorList([Keeping()])},
        {"stopping_criteria": [Keeping()]},
        {"change": hooked},
        {"change": replaced},
        {"change": foreign},
        {"change": subclassed},
        {"change": attending_by_itself},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ],
)
def test_where_somebody_may_see_its_tensors_it_is_not_used(modes, options):
    change, rope = options.pop("change", None), options.pop("rope_parameters", None)
    target = tiny_target("llama", **({"rope_parameters": rope} if rope else {}))
    if change is not None:
        change(target)
    if "past_key_values" in options:
        options = {"past_key_values": DynamicCache(config=target.config)}
    # What a processor of transformers' own does is asked for in another way.
    plain = target.generate(random_prompt(5), **OPTIONS, sequence_bias=options.pop("sequence_bias", None))
    found = target.generate(random_prompt(5), assistant_model=tiny_drafter("dflash", target), **OPTIONS, **options)
    patched.undo()
    assert torch.equal(found if isinstance(found, torch.Tensor) else found.sequences, plain)
    assert set(modes) == {False}


class Watching(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class WatchingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("watch", [Watching, WatchingBelow])
def test_a_mode_that_watches_all_functions_of_torch_sees_tensors_of_no_inference_mode(modes, watch):
    target = tiny_target("llama")
    drafter = tiny_drafter("dflash", target)
    with watch():
        target.generate(random_prompt(5), assistant_model=drafter, **OPTIONS)
    assert set(modes) == {False}
    modes.clear()
    with torch.device("cpu"):
        target.generate(random_prompt(5), assistant_model=drafter, **OPTIONS)
    assert set(modes) == {True}


@pytest.mark.parametrize(
    "register", [register_module_forward_hook, register_module_forward_pre_hook], ids=["after", "before"]
)
def test_a_hook_of_all_modules_sees_tensors_of_no_inference_mode(modes, register):
    target = tiny_target("llama")
    drafter, seen = tiny_drafter("dflash", target), []
    handle = register(lambda module, *given: seen.append(type(module)) and None)
    try:
        target.generate(random_prompt(5), assistant_model=drafter, **OPTIONS)
    finally:
        handle.remove()
    assert seen
    assert set(modes) == {False}


def test_hooks_of_a_drafter_count_too(modes):
    target = tiny_target("llama")
    drafter = tiny_drafter("dflash", target)
    drafter.register_forward_pre_hook(lambda module, given: None)
    target.generate(random_prompt(5), assistant_model=drafter, **OPTIONS)
    assert set(modes) == {False}


def test_neither_recurrent_layers_nor_compiled_rounds_run_in_it(modes, monkeypatch):
    target = hybrid_target("lfm2")
    target.generate(random_prompt(5), assistant_model=tiny_drafter("dflash", target), **OPTIONS)
    leave_uncompiled(monkeypatch)
    target = tiny_target("llama")
    drafter = tiny_drafter("dflash", target)
    target.generate(random_prompt(5), assistant_model=drafter, cache_implementation="static", **OPTIONS)
    assert set(modes) == {False}


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.values = []

    def put(self, value):
        self.values.append(value)

    def end(self):
        pass


@pytest.mark.parametrize("is_left", [False, True])
def test_what_a_streamer_is_shown_is_as_usable_as_ever(monkeypatch, is_left):
    monkeypatch.setattr(Schedule, "leaves_to_plain", lambda self, batch, length: is_left)
    target, streamer = tiny_target("llama"), Kept()
    drafter = tiny_drafter("dflash", target)
    drafter.generation_config.draft_schedule = "auto"
    target.generate(random_prompt(5), assistant_model=drafter, streamer=streamer, **OPTIONS)
    assert streamer.values
    assert not any(value.is_inference() for value in streamer.values)


@pytest.mark.parametrize("options", [{}, {"return_dict_in_generate": True}])
def test_what_is_left_to_plain_generate_runs_in_it_as_well(monkeypatch, options):
    monkeypatch.setattr(Schedule, "leaves_to_plain", lambda self, batch, length: True)
    target, seen = tiny_target("llama"), []
    sample = type(target)._sample

    def noted(self, *arguments, **more):
        seen.append(torch.is_inference_mode_enabled())
        return sample(self, *arguments, **more)

    monkeypatch.setattr(type(target), "_sample", noted)
    drafter = tiny_drafter("dflash", target)
    drafter.generation_config.draft_schedule = "auto"
    monkeypatch.setattr("hf_pardraft.generation.hooks.check_request", lambda *arguments: None)
    found = target.generate(random_prompt(5), assistant_model=drafter, **OPTIONS, **options)
    assert seen == [not options]
    assert not (found if isinstance(found, torch.Tensor) else found.sequences).is_inference()


def test_what_is_compiled_for_plain_generate_is_not_compiled_anew_for_what_is_left_to_it(monkeypatch):
    """What is compiled is compiled for a mode."""
    monkeypatch.setattr(Schedule, "leaves_to_plain", lambda self, batch, length: True)
    target, prompt, graphs = tiny_target("llama", num_hidden_layers=2), random_prompt(6), []
    config = CompileConfig(backend=lambda graph, inputs, **options: graphs.append(1) or graph.forward)
    # As on an accelerator.
    config._compile_all_devices = True
    drafter = tiny_drafter("dflash", target, num_layers=1)
    drafter.generation_config.draft_schedule = "auto"
    options = {"cache_implementation": "static", "compile_config": config, **OPTIONS}
    counts = []
    for assistant in ({}, {"assistant_model": drafter}, {}):
        target.generate(prompt, **assistant, **options)
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts == [counts[0]] * 3


class Keeper:
    """Is called like the function that it takes the place of, and keeps what that makes."""

    def __init__(self, function):
        self.function, self.kept = function, []

    def __call__(self, *arguments, **options):
        self.kept.append(self.function(*arguments, **options))
        return self.kept[-1]


def test_what_is_no_function_counts_also_before_anybody_has_looked(modes, monkeypatch):
    inference_mode.called_by.cache_clear()
    keeper = Keeper(modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", keeper)
    target = tiny_target("llama")
    target.generate(random_prompt(5), assistant_model=tiny_drafter("dflash", target), **OPTIONS)
    assert set(modes) == {False}
    assert not any(tensor.is_inference() for tensor in keeper.kept[-1])
    inference_mode.called_by.cache_clear()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_compiled_module_has_no_forward_that_could_be_looked_at():
    target = tiny_target("qwen3")
    plain = target.generate(random_prompt(5), **OPTIONS)
    target.model.layers[0].mlp.act_fn = torch.jit.script(torch.nn.SiLU())
    found = target.generate(random_prompt(5), assistant_model=tiny_drafter("pard", target), **OPTIONS)
    assert torch.equal(found, plain)
