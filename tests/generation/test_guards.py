"""What compiled code depends on is looked at once a call: never in every round, and never not at all."""

import pytest
import torch
from transformers import CompileConfig
from transformers.models.llama import modeling_llama

from compiled_cases import ONE_LAYER, assert_same, oracle, static, texts_of
from hf_pardraft.generation.compiled import compiler as compiling
from hf_pardraft.generation.tree.token_tree import TokenTree, chain_tree
from tiny_models import batch_of, random_prompt, tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EAGER = CompileConfig(backend="eager")


@pytest.fixture
def looks(monkeypatch):
    """The steps whose guards were checked, and whether they held."""
    seen, original = [], compiling.code_for

    def watched(function, arguments):
        code = original(function, arguments)
        seen.append((function.__name__, code is not None))
        return code

    monkeypatch.setattr(compiling, "code_for", watched)
    return seen


@pytest.mark.parametrize("settings", [{}, {"tree_budget": 6}])
def test_guards_are_checked_once_a_call(looks, settings):
    target = tiny_target("llama", num_hidden_layers=2)
    drafter, prompt = tiny_drafter("dflash", target, **ONE_LAYER["dflash"]), random_prompt(20)
    for name, value in settings.items():
        setattr(drafter.generation_config, name, value)
    for _ in range(2):
        static(target, prompt, drafter, EAGER, max_new_tokens=40)
    looks.clear()
    static(target, prompt, drafter, EAGER, max_new_tokens=40)
    assert drafter.last_stats.rounds > 10
    assert looks == [("read_commit_and_draft", True)]


def test_guards_are_checked_again_when_buffers_have_grown(looks):
    target = tiny_target("llama", num_hidden_layers=1, max_position_embeddings=2048)
    drafter, prompt = tiny_drafter("pard", target, **ONE_LAYER["pard"]), random_prompt(235)
    for _ in range(2):
        static(target, prompt, drafter, EAGER, max_new_tokens=40)
    looks.clear()
    static(target, prompt, drafter, EAGER, max_new_tokens=40)
    # The drafter's buffers grow some rounds before the target's.
    assert looks == 3 * [("read_commit_and_draft", True)]
    assert drafter.last_stats.rounds > 20


def scaling(target, drafter, monkeypatch):
    target.model.layers[0].self_attn.scaling *= 3


def other_weights(target, drafter, monkeypatch):
    with torch.no_grad():
        target.model.layers[0].mlp.down_proj.weight.mul_(-2)


def replaced_weights(target, drafter, monkeypatch):
    layer = target.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(-2 * layer.weight.detach())


def replaced_module(target, drafter, monkeypatch):
    target.model.layers[0].mlp = torch.nn.Identity()


def hook(target, drafter, monkeypatch):
    target.model.layers[0].register_forward_hook(lambda module, args, output: -output)


def other_hook(target, drafter, monkeypatch):
    """In the place of the one that there was."""
    target.model.layers[0]._forward_hooks.clear()
    target.model.layers[0].register_forward_hook(lambda module, args, output: output.flip(-1))


def hook_of_all_modules(target, drafter, monkeypatch):
    def turned(module, args, output):
        return -output if module is target.model.layers[0].mlp else None

    monkeypatch.setitem(torch.nn.modules.module._global_forward_hooks, 10**9, turned)


def double_precision(target, drafter, monkeypatch):
    target.to(torch.float64)


def global_function(target, drafter, monkeypatch):
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)


@pytest.mark.parametrize(
    "changes",
    [
        (other_weights, replaced_weights, scaling, global_function, replaced_module, double_precision),
        (hook, other_hook, hook_of_all_modules),
    ],
    ids=lambda changes: "-".join(change.__name__ for change in changes),
)
def test_changes_between_two_calls_are_seen(monkeypatch, looks, changes):
    """The text is that of the model as it is now, after each of several changes."""
    target, batch = tiny_target("llama", num_hidden_layers=1), batch_of(6)
    drafter = tiny_drafter("pard", target, **ONE_LAYER["pard"])
    assert_same(target, batch, drafter, compile_config=EAGER)
    for change in changes:
        before = texts_of(target, batch)
        change(target, drafter, monkeypatch)
        assert_same(target, batch, drafter.to(target.dtype), compile_config=EAGER)
        if change is not double_precision:
            assert not torch.equal(texts_of(target, batch)[0], before[0])
        # A step that was given up would run as it is, and see every change.
        looks.clear()
        assert_same(target, batch, drafter, compile_config=EAGER)
        assert ("read_commit_and_draft", True) in looks


def test_a_model_in_several_steps_writes_the_same_text(looks):
    """What follows a graph break is only found by Dynamo."""
    target, batch = tiny_target("llama", num_hidden_layers=1), batch_of(6)
    target.model.layers[0].register_forward_hook(lambda *arguments: torch._dynamo.graph_break())
    drafter = oracle("pard", target, batch, **ONE_LAYER["pard"])
    for _ in range(2):
        assert_same(target, batch, drafter, compile_config=EAGER)
    assert looks
    assert ("read_commit_and_draft", True) not in looks


def test_who_tells_torch_to_run_eager_gets_it():
    calls = []

    def counting(graph, inputs, **options):
        def forward(*arguments):
            calls.append(graph)
            return graph.forward(*arguments)

        return forward

    target, prompt = tiny_target("llama", num_hidden_layers=1), random_prompt(9)
    drafter, config = tiny_drafter("pard", target, **ONE_LAYER["pard"]), CompileConfig(backend=counting)
    expected = static(target, prompt, drafter, config, max_new_tokens=40)
    assert calls
    calls.clear()
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(static(target, prompt, drafter, config, max_new_tokens=40), expected)
    assert not calls


def test_without_a_way_to_the_code_guards_are_checked_in_every_round(monkeypatch):
    """A torch that keeps compiled code elsewhere."""
    monkeypatch.delattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list")
    target, batch = tiny_target("llama", num_hidden_layers=2), batch_of(6)
    drafter = oracle("dflash", target, batch, **ONE_LAYER["dflash"])
    for _ in range(2):
        assert_same(target, batch, drafter, compile_config=EAGER)


def test_layouts_tell_shapes_and_strides_apart():
    values = torch.zeros(4, 6)
    assert compiling.layout_of_arguments((values, 3)) == compiling.layout_of_arguments((torch.ones(4, 6), 5))
    assert compiling.layout_of_arguments((values[:, :3],)) != compiling.layout_of_arguments((values[:, :3].clone(),))
    assert compiling.layout_of_arguments((values,)) != compiling.layout_of_arguments((values.T,))
    chain = chain_tree(torch.zeros(2, 3, dtype=torch.long))
    same = TokenTree(chain.tokens, chain.parents, chain.depths, chain.ancestors, is_chain=False)
    assert compiling.layout_of_arguments((chain,)) != compiling.layout_of_arguments((same,))
