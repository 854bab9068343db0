"""What is compiled, how often, with which options; and what runs eager instead, having said why."""

import functools
import gc
import logging
import weakref

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    GPTNeoConfig,
    Lfm2Config,
    Llama4TextConfig,
)

from compiled_cases import GREEDY, ONE_LAYER, assert_same, eager_and_static, oracle, static
from hf_pardraft.generation import dispatch as loops
from hf_pardraft.generation.compiled import compiler as compiling
from hf_pardraft.generation.compiled.compiler import Compiler
from hf_pardraft.generation.compiled.steps import DecodeState
from hf_pardraft.generation.target_side.step_inputs import SLICED_INPUTS
from tiny_models import batch_of, random_prompt, tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def warnings(caplog):
    """What has been logged, once or not, with some words in it."""
    logging.Logger.warning_once.cache_clear()
    caplog.set_level(logging.WARNING)

    def said(*words):
        return [record.getMessage() for record in caplog.records if all(word in record.getMessage() for word in words)]

    return said


class Counting:
    """A backend that runs what it is given as it is, and notes how often and with which options it was asked."""

    def __init__(self):
        self.calls = []

    def __call__(self, graph, inputs, **options):
        self.calls.append(options)
        return graph.forward

    def config(self, **fields):
        return CompileConfig(backend=self, **fields)


@pytest.mark.parametrize(
    ("kind", "settings", "options", "steps"),
    [
        ("pard", {}, {}, 1),
        ("dflash", {"tree_budget": 6}, {}, 1),
        ("dart", {}, {"do_sample": True, "top_k": 9}, 3),
    ],
)
def test_nothing_is_compiled_anew_after_the_first_calls(kind, settings, options, steps):
    """For prompts of 10 to 1000 tokens, other texts, other lengths, other calls, and batch sizes that have been seen."""
    target = tiny_target("llama", num_hidden_layers=2, max_position_embeddings=2048)
    drafter, backend = tiny_drafter(kind, target, **ONE_LAYER[kind]), Counting()
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    batch = batch_of(9, 5, 3)
    call = functools.partial(static, target, drafter=drafter, config=backend.config(), **options)
    for _ in range(2):
        call(ids=random_prompt(20), max_new_tokens=40)
        call(ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    compiled = len(backend.calls)
    # For each of the two batch sizes.
    assert compiled == 2 * steps
    counters.clear()
    for seed, length in enumerate((10, 100, 250, 257, 600, 1000)):
        call(ids=random_prompt(length, seed), max_new_tokens=2 + 3 * seed)
    other = batch_of(30, 60, 2)
    call(ids=other["input_ids"], attention_mask=other["attention_mask"])
    assert len(backend.calls) == compiled
    assert not counters["recompiles"]
    assert counters["stats"]["unique_graphs"] == 0


def test_options_reach_the_compiler():
    target = tiny_target("llama", num_hidden_layers=1)
    drafter, backend = tiny_drafter("pard", target, **ONE_LAYER["pard"]), Counting()
    static(target, random_prompt(5), drafter, backend.config())
    assert all(options["mode"] == "reduce-overhead" for options in backend.calls)
    num_default = len(backend.calls)
    static(target, random_prompt(5), drafter, backend.config(mode=None, options={"max_autotune": True}))
    assert len(backend.calls) == 2 * num_default
    assert all(options["options"] == {"max_autotune": True} for options in backend.calls[num_default:])


@pytest.mark.parametrize("fields", [{"backend": "no-such-backend"}, {"options": {"max_autotune": True}}])
def test_options_that_nobody_can_use_are_refused_before_the_prompt_is_read(monkeypatch, fields):
    target = tiny_target("llama", num_hidden_layers=1)
    drafter = tiny_drafter("pard", target)
    usual = target.forward

    @functools.wraps(usual)
    def read(*args, **kwargs):
        # A forward that somebody has replaced is tried with a few tokens.
        return usual(*args, **kwargs) if kwargs["input_ids"].shape[1] < 5 else pytest.fail("the prompt was read")

    monkeypatch.setattr(target, "forward", read)
    with pytest.raises(RuntimeError, match=r"no-such-backend|mode or options"):
        static(target, random_prompt(5), drafter, CompileConfig(**fields))


def test_nothing_is_compiled_unless_asked(monkeypatch, warnings):
    target = tiny_target("llama", num_hidden_layers=1)
    drafter, prompt = tiny_drafter("pard", target), random_prompt(5)
    expected = target.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("something was compiled"))
    options = {"attention_mask": torch.ones_like(prompt), "assistant_model": drafter, **GREEDY}
    assert torch.equal(target.generate(prompt, **options), expected)
    assert torch.equal(static(target, prompt, drafter, disable_compile=True), expected)
    assert torch.equal(static(target, prompt, drafter, CompileConfig(), disable_compile=True), expected)
    assert not warnings("ompil")
    for _ in range(2):
        assert torch.equal(target.generate(prompt, compile_config=CompileConfig(), **options), expected)
    assert len(warnings("compile_config", "will be skipped")) == 1


def failing(graph, inputs, **options):
    raise ValueError("this machine has no compiler")


def test_a_compiler_that_fails_is_named_once_and_the_rounds_run_eager(warnings):
    target, batch = tiny_target("llama", num_hidden_layers=2), batch_of(6, 3)
    for kind, settings in (("pard", {}), ("dflash", {"tree_budget": 6})):
        drafter = oracle(kind, target, batch, settings=settings, **ONE_LAYER[kind])
        assert_same(target, batch, drafter, compile_config=CompileConfig(backend=failing))
    assert warnings("run uncompiled") == [
        "Compiling the rounds failed, so they run uncompiled: ValueError: this machine has no compiler"
    ]


def test_without_a_cpp_compiler_rounds_run_eager(monkeypatch, warnings, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    target, batch = tiny_target("llama", num_hidden_layers=1), batch_of(6)
    drafter = oracle("pard", target, batch, **ONE_LAYER["pard"])
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        assert_same(target, batch, drafter)
    (message,) = warnings("run uncompiled")
    assert "C++ compiler" in message


class FailsAfter:
    """A backend that compiles so many graphs, and no more."""

    def __init__(self, num_graphs):
        self.num_graphs = num_graphs

    def __call__(self, graph, inputs, **options):
        self.num_graphs -= 1
        return graph.forward if self.num_graphs >= 0 else failing(graph, inputs)


def grow(decode_state, by):
    decode_state.lengths.add_(by)
    torch._dynamo.graph_break()
    return decode_state.lengths * 2


def grow_at_once(decode_state, by):
    return decode_state.lengths.add_(by)


def small_standing():
    return DecodeState(*(torch.full((2,), value) for value in range(6)))


def test_a_piece_that_fails_behind_a_graph_break_begins_again(warnings):
    """What stands before it has changed the lengths already."""
    target = tiny_target("llama", num_hidden_layers=1)
    compiler, decode_state = Compiler(target, CompileConfig(backend=FailsAfter(1))), small_standing()
    for round_number in (1, 2):
        assert compiler(grow, "shape", decode_state, 3).tolist() == 2 * [6 * round_number]
    assert decode_state.lengths.tolist() == [6, 6]
    assert len(warnings("run uncompiled")) == 1


@pytest.mark.parametrize("fails", ["backend", "limit"])
def test_what_can_not_be_compiled_anew_runs_eager(warnings, fails):
    """When a later call finds other things than the first one, in the middle of a text if it has to."""
    target = tiny_target("llama", num_hidden_layers=1)
    backend, limit = (FailsAfter(1), 8) if fails == "backend" else ("eager", 1)
    compiler, decode_state = Compiler(target, CompileConfig(fullgraph=True, backend=backend)), small_standing()
    with torch._dynamo.config.patch(recompile_limit=limit):
        for by in (1, 2, 3):
            compiler.check_again()
            compiler(grow_at_once, "shape", decode_state, by)
    assert decode_state.lengths.tolist() == [6, 6]
    assert len(warnings("run uncompiled")) == 1


def out_of_memory(graph, inputs, **options):
    raise torch.OutOfMemoryError("out of memory while compiling")


def broken(graph, inputs, **options):
    def run(*arguments):
        raise IndexError("index out of range in self")

    return run


@pytest.mark.parametrize(("backend", "error"), [(out_of_memory, torch.OutOfMemoryError), (broken, IndexError)])
def test_real_errors_are_raised(backend, error):
    target = tiny_target("llama", num_hidden_layers=1)
    drafter = tiny_drafter("pard", target, **ONE_LAYER["pard"])
    with pytest.raises(error, match="out of"):
        static(target, random_prompt(5), drafter, CompileConfig(backend=backend))


SIZES = {"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
HEADS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
UNFIT = {
    "recurrent layers": Lfm2Config(
        **SIZES, **HEADS, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, initializer_range=0.2
    ),
    "masks and positions": GPTNeoConfig(
        **SIZES, attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4, window_size=4
    ),
    "Llama 4": Llama4TextConfig(
        **SIZES,
        **HEADS,
        intermediate_size_mlp=48,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=6,
        initializer_range=0.2,
    ),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_targets_that_buffers_cannot_serve_run_eager(monkeypatch, warnings, reason):
    torch.manual_seed(0)
    target, batch = AutoModelForCausalLM.from_config(UNFIT[reason]).eval(), batch_of(6)
    drafter = oracle("pard", target, batch)
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("something was compiled"))
    assert_same(target, batch, drafter)
    assert_same(target, batch, drafter)
    (message,) = warnings("Rounds are not compiled")
    assert reason in message


def test_states_that_are_asked_for_come_from_eager_rounds(monkeypatch, warnings):
    target, batch = tiny_target("llama"), batch_of(6)
    drafter = oracle("pard", target, batch)
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("something was compiled"))
    options = {"return_dict_in_generate": True, "output_hidden_states": True}
    (eager, _), (static, _) = eager_and_static(target, batch, drafter, **options)
    assert torch.equal(static.sequences, eager.sequences)
    assert len(static.hidden_states) == len(eager.hidden_states)
    assert len(warnings("hidden states")) == 1


def test_a_drafter_on_another_device_runs_eager():
    target = tiny_target("llama", num_hidden_layers=1)
    drafter = tiny_drafter("pard", target).to("meta")
    arguments = {"model_kwargs": {}, "inputs": SLICED_INPUTS}
    reason = loops.reason_against(target, drafter, target.device, target.generation_config, arguments)
    assert "several devices (cpu, meta)" in reason
    drafter = tiny_drafter("pard", target)
    reason = loops.reason_against(target, drafter, torch.device("meta"), target.generation_config, arguments)
    assert reason == "the prompt is on meta, and the target on cpu"


def test_what_was_compiled_does_not_keep_a_target_alive():
    target = tiny_target("llama", num_hidden_layers=1)
    drafter = tiny_drafter("pard", target, **ONE_LAYER["pard"])
    static(target, random_prompt(5), drafter, CompileConfig(backend="eager"))
    references = [weakref.ref(target), weakref.ref(drafter)]
    del target, drafter
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_what_was_compiled_for_a_drafter_goes_with_it():
    target, config = tiny_target("llama", num_hidden_layers=2), CompileConfig(backend="eager")
    drafters = [tiny_drafter(kind, target, **ONE_LAYER[kind]) for kind in ("pard", "dflash")]
    for drafter in drafters:
        static(target, random_prompt(5), drafter, config)
    known = [steps for steps in compiling._compiled[target].values() if steps]
    assert [len(steps) for steps in known] == [2]
    del drafter, drafters[0]
    gc.collect()
    assert len(known[0]) == 1
    drafters.clear()
    gc.collect()
    assert not known[0]
