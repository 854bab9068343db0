"""Targets whose steps, or whose forwards over several tokens, are not what the loop relies on: refused in one sentence."""

import math
from functools import partial, wraps

import pytest
import torch
from peft.tuners.lora import model as lora
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    CpmAntConfig,
    CTRLConfig,
    FalconConfig,
    GenerationMixin,
    GPT2Config,
    LlamaForCausalLM,
    MoshiConfig,
    OpenAIGPTConfig,
    ProphetNetConfig,
    XLMConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_pardraft.generation import checks, hooks
from tiny_models import batch_oracle, make_oracle, ragged_prompts, random_prompt, tiny_drafter, tiny_target
from unusual_targets import llama4

PROMPT = random_prompt(8)
OPTIONS = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False, "max_new_tokens": 16}
COMMON = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
PROPHETNET = {"hidden_size": 32, "is_encoder_decoder": False, "add_cross_attention": False}
PROPHETNET |= {f"num_{side}_layers": 2 for side in ("encoder", "decoder")}
PROPHETNET |= {f"num_{side}_attention_heads": 4 for side in ("encoder", "decoder")}
UNSERVABLE = {
    "a mask token after each text": (
        XLMConfig,
        {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True},
        "input_ids",
    ),
    "no cache": (OpenAIGPTConfig, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, "input_ids"),
    "the whole text in each step": (
        CpmAntConfig,
        {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48, "num_hidden_layers": 2},
        "input_ids",
    ),
    "one token beside a cache": (ProphetNetConfig, PROPHETNET, "reads one token at a time beside its cache"),
    "a mask without the cache's window": (
        MoshiConfig,
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "head_dim": 8},
        "its cache forgets",
    ),
}


def made(config_class, fields):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(**COMMON, **fields)).eval()


def drafted(target, drafter, **options):
    return target.generate(PROMPT, assistant_model=drafter, **(OPTIONS | options))


@pytest.mark.parametrize("name", UNSERVABLE)
@pytest.mark.parametrize("loop", ["native", "stock"])
def test_what_can_not_be_followed_is_refused_before_any_forward(name, loop):
    config_class, fields, message = UNSERVABLE[name]
    target = made(config_class, fields)
    forwards = []
    target.register_forward_pre_hook(lambda *arguments: forwards.append(arguments))
    drafter = tiny_drafter("pard", tiny_target("llama"))
    drafter.generation_config.decode_loop = loop
    with pytest.raises(ValueError, match=message) as error:
        drafted(target, drafter)
    assert "call generate without assistant_model" in str(error.value).replace("Call", "call")
    assert "\n" not in str(error.value)
    assert not forwards


def tiny_falcon(attention):
    torch.manual_seed(0)
    config = FalconConfig(**COMMON, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("loop", ["native", "stock"])
def test_attentions_of_a_falcon_whose_mask_is_not_for_them_are_refused(loop):
    target, states = tiny_falcon("sdpa"), {"return_dict_in_generate": True, "output_hidden_states": True}
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.decode_loop = loop
    with pytest.raises(ValueError, match='attn_implementation="eager"'):
        drafted(target, drafter, **states, output_attentions=True)
    expected = target.generate(PROMPT, **OPTIONS, **states)
    assert torch.equal(drafted(target, drafter, **states).sequences, expected.sequences)


@pytest.mark.parametrize("tree_budget", [0, 8])
def test_and_of_one_with_another_mask_they_are_plains(tree_budget):
    target = tiny_falcon("eager")
    options = {"return_dict_in_generate": True, "output_attentions": True}
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.draft_schedule, drafter.generation_config.tree_budget = "fixed", tree_budget
    expected = target.generate(PROMPT, **OPTIONS, **options)
    found = drafted(target, drafter, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.attentions, expected.attentions, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING"])
def test_prompt_learning_is_refused_and_leaves_the_base_model_as_it_was(kind):
    peft = pytest.importorskip("peft")
    base = tiny_target("llama")
    model = peft.get_peft_model(
        base, peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind](task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    drafter = tiny_drafter("pard", base)
    with pytest.raises(ValueError, match="PEFT's prompt learning"):
        model.eval().generate(input_ids=PROMPT, assistant_model=drafter, **OPTIONS)
    # The same model without its prompt, after that call.
    assert torch.equal(drafted(base, drafter), base.generate(PROMPT, **OPTIONS))


@pytest.mark.parametrize("loop", ["native", "stock"])
def test_a_target_that_trains_with_gradient_checkpointing_is_refused_until_it_is_in_eval_mode(loop):
    target = tiny_target("llama").train()
    target.activation_checkpointing_enable()
    drafter = tiny_drafter("pard", target)
    drafter.generation_config.decode_loop = loop
    with pytest.raises(ValueError, match=r"gradient checkpointing.*eval\(\)"):
        drafted(target, drafter)
    target.eval()
    assert torch.equal(drafted(target, drafter), target.generate(PROMPT, **OPTIONS))


def test_an_adapter_that_counts_tokens_from_the_end_of_a_forward_is_refused_and_others_are_served():
    peft = pytest.importorskip("peft")
    fields = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": ["q_proj", "v_proj"]}
    activated = peft.get_peft_model(
        tiny_target("llama"), peft.LoraConfig(alora_invocation_tokens=PROMPT[0, 3:4].tolist(), **fields)
    ).eval()
    with pytest.raises(ValueError, match="activated LoRA adapter"):
        activated.generate(input_ids=PROMPT, assistant_model=tiny_drafter("pard", tiny_target("llama")), **OPTIONS)
    model = peft.get_peft_model(tiny_target("llama"), peft.LoraConfig(**fields)).eval()
    expected = model.generate(input_ids=PROMPT, **OPTIONS)
    drafter = make_oracle(tiny_drafter("pard", tiny_target("llama")), expected[0], [0.8] * 4)
    assert torch.equal(model.generate(input_ids=PROMPT, assistant_model=drafter, **OPTIONS), expected)


class Slices(LlamaForCausalLM):
    """As remote code often does: its own slicing, with the same result."""

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, position_ids=None, **kwargs):
        past = past_key_values.get_seq_length()
        kwargs.pop("next_sequence_length", None)
        kwargs.pop("is_first_iteration", None)
        inputs = {"input_ids": input_ids[:, past:], "past_key_values": past_key_values, **kwargs}
        return inputs | {"position_ids": position_ids[:, past:]}


class Shifts(Slices):
    """Positions that start at 5."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs | {"position_ids": inputs["position_ids"] + 5}


class ShiftsLater(Slices):
    """Only after the first step."""

    def prepare_inputs_for_generation(self, input_ids, is_first_iteration=False, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return inputs if is_first_iteration else inputs | {"position_ids": inputs["position_ids"] * 2}


class Stumbles(Slices):
    """Not made for such a step."""

    def prepare_inputs_for_generation(self, input_ids, is_first_iteration=False, **kwargs):
        if not is_first_iteration:
            raise KeyError("rope_index")
        return super().prepare_inputs_for_generation(input_ids, **kwargs)


class Updates(LlamaForCausalLM):
    """Another attention mask after each step."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        return updated | {"attention_mask": torch.ones(1, 3)}


class Samples(LlamaForCausalLM):
    """Writes in its own way."""

    def _sample(self, input_ids, **kwargs):
        return torch.cat([input_ids, input_ids], dim=1)


def as_class(model_class):
    target = tiny_target("llama")
    target.__class__ = model_class
    return target


def test_a_method_that_only_slices_is_served():
    target = as_class(Slices)
    expected = target.generate(PROMPT, **OPTIONS)
    assert torch.equal(expected, tiny_target("llama").generate(PROMPT, **OPTIONS))
    for budget in (0, 8):
        drafter = make_oracle(tiny_drafter("dflash", target), expected[0], [0.8] * 4, runner_up=0.6)
        drafter.generation_config.tree_budget = budget
        assert torch.equal(drafted(target, drafter), expected)
        assert drafter.last_stats.tau > 1.2


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (Shifts, "position_ids"),
        (ShiftsLater, "position_ids"),
        (Stumbles, "KeyError: 'rope_index'"),
        (Updates, "attention_mask"),
        (Samples, "in a way of its own"),
    ],
)
def test_a_method_that_does_more_is_refused(model_class, message):
    target = as_class(model_class)
    with pytest.raises(ValueError, match=message):
        drafted(target, tiny_drafter("pard", target))


class LooksAhead(LlamaForCausalLM):
    """What comes after a token in the same forward changes its logits."""

    def forward(self, input_ids, **kwargs):
        outputs = super().forward(input_ids, **kwargs)
        outputs.logits = outputs.logits + 0.1 * input_ids.shape[1]
        return outputs


class IgnoresMasks(LlamaForCausalLM):
    """Makes masks of its own."""

    def forward(self, input_ids, position_ids=None, attention_mask=None, **kwargs):
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


class ReadsOne(LlamaForCausalLM):
    """Reads a prompt, and then single tokens."""

    def forward(self, input_ids, past_key_values=None, **kwargs):
        assert input_ids.shape[1] == 1 or past_key_values.get_seq_length() == 0, "one token, please"
        return super().forward(input_ids, past_key_values=past_key_values, **kwargs)


def test_code_that_nobody_has_tried_is_tried_once():
    target, drafter, forwards = as_class(LooksAhead), tiny_drafter("pard", tiny_target("llama")), []
    with pytest.raises(ValueError, match=r"does not read them as it reads one by one .*its logits differed by"):
        drafted(target, drafter)
    with pytest.raises(ValueError, match="raised AssertionError: one token, please"):
        drafted(as_class(ReadsOne), drafter)
    target = as_class(IgnoresMasks)
    expected = target.generate(PROMPT, **OPTIONS)
    # A chain needs none.
    assert torch.equal(drafted(target, drafter), expected)
    drafter.generation_config.tree_budget = 6
    with pytest.raises(ValueError, match="its logits differed"):
        drafted(target, drafter)
    target = as_class(Slices)
    target.register_forward_pre_hook(lambda *arguments: forwards.append(arguments))
    counts = []
    for _ in range(3):
        forwards.clear()
        drafted(target, drafter)
        counts.append(len(forwards))
    assert counts[0] > counts[1] == counts[2]


def last_token_shifted(usual):
    """What steers each new token, as long as a forward has one."""

    def forward(*args, **kwargs):
        states = usual(*args, **kwargs).clone()
        states[:, -1] += 3
        return states

    return forward


def test_a_forward_that_was_put_in_the_place_of_a_layers_own_is_tried_too():
    target, drafter = tiny_target("llama"), tiny_drafter("pard", tiny_target("llama"))
    mlp = target.model.layers[1].mlp
    usual = mlp.forward
    mlp.forward = lambda states: 2 * usual(states)
    # Twice, since what was tried once is not tried again.
    for _ in range(2):
        assert torch.equal(drafted(target, drafter), target.generate(PROMPT, **OPTIONS))
    # What wraps a method says that it is from where that is.
    for forward in (last_token_shifted(usual), wraps(usual)(last_token_shifted(usual))):
        mlp.forward = forward
        with pytest.raises(ValueError, match="its logits differed by"):
            drafted(target, drafter)
    del mlp.forward
    assert torch.equal(drafted(target, drafter), target.generate(PROMPT, **OPTIONS))


def test_an_attention_function_of_a_callers_own_is_tried_too():
    def scaled(module, query, key, value, mask, scaling=None, **kwargs):
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling * scale_of(key), **kwargs)

    AttentionInterface.register("scaled", scaled)
    AttentionMaskInterface.register("scaled", sdpa_mask)
    target, drafter = tiny_target("llama"), tiny_drafter("pard", tiny_target("llama"))
    target.set_attn_implementation("scaled")
    scale_of = lambda key: 2.0  # noqa: E731
    assert torch.equal(drafted(target, drafter), target.generate(PROMPT, **OPTIONS))
    target = tiny_target("llama")
    target.set_attn_implementation("scaled")
    scale_of = lambda key: math.log(key.shape[2])  # noqa: E731
    with pytest.raises(ValueError, match="its logits differed by"):
        drafted(target, drafter)


class Steering:
    """A hook that is a method, and one that is an object."""

    def shift(self, module, args, output):
        return output + 1

    __call__ = shift


def test_hooks_of_a_callers_own_are_warned_of_and_those_of_known_packages_are_not(monkeypatch):
    said, target = [], tiny_target("llama")
    monkeypatch.setattr(checks.logger, "warning_once", said.append)
    parametrizations.weight_norm(target.model.layers[0].mlp.up_proj)
    prune.l1_unstructured(target.model.layers[0].mlp.down_proj, "weight", amount=0.2)
    of_peft = partial(lora._adapter_names_pre_forward_hook, adapter_names=None)
    target.model.layers[1].register_forward_pre_hook(of_peft, with_kwargs=True)
    drafter = tiny_drafter("dflash", target)
    # transformers' own are on it from the first call on.
    for _ in range(2):
        drafted(target, drafter)
    assert said == []
    layer = target.model.layers[0].mlp
    for hook in (lambda module, args, output: None, Steering().shift, Steering(), partial(Steering().shift)):
        handle = layer.register_forward_hook(hook)
        drafted(target, drafter)
        handle.remove()
    handle = register_module_forward_hook(lambda module, args, output: None)
    drafted(target, drafter)
    handle.remove()
    assert len(said) == 5
    assert all("forward hooks" in text for text in said)


def test_an_instance_may_be_patched_too():
    target = tiny_target("llama")
    own = target.prepare_inputs_for_generation
    target.prepare_inputs_for_generation = lambda *args, **kwargs: (
        own(*args, **kwargs) | {"inputs_embeds": torch.ones(1)}
    )
    with pytest.raises(ValueError, match="inputs_embeds"):
        drafted(target, tiny_drafter("pard", target))


@pytest.mark.parametrize("floor_scale", [8, 16, 64])
def test_llama4_scales_by_columns_which_only_chains_of_one_sequence_share(floor_scale):
    target = llama4(
        attn_temperature_tuning=True,
        attn_scale=0.5,
        floor_scale=floor_scale,
        no_rope_layers=[1, 0, 1, 0],
        attention_chunk_size=64,
    )
    for lengths, budget in (((8,), 0), ((8,), 8), ((8, 5, 7), 0)):
        ids, mask = ragged_prompts(lengths)
        options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 20}
        expected = target.generate(ids, **options)
        drafter = batch_oracle("pard", target, expected, mask, budget)
        if floor_scale < 40 and (budget or len(lengths) > 1):
            with pytest.raises(ValueError, match=f"once there are {floor_scale} of them"):
                target.generate(ids, assistant_model=drafter, **options)
        else:
            assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("lengths", [(9,), (9, 6, 4)])
def test_token_types_go_on_as_plain_generate_lets_them(lengths, budget):
    target = made(GPT2Config, {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.2})
    ids, mask = ragged_prompts(lengths)
    types = torch.randint(3, 9, ids.shape, generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": mask, "token_type_ids": types, "do_sample": False, "max_new_tokens": 20}
    expected = target.generate(ids, **options)
    assert not torch.equal(expected, target.generate(ids, **(options | {"token_type_ids": types * 0})))
    drafter = batch_oracle("dflash", target, expected, mask, budget)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    assert drafter.last_stats.tau > 1.2


def test_a_target_that_works_its_token_types_out_itself_gets_none():
    target = made(CTRLConfig, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "dff": 48})
    options = OPTIONS | {"token_type_ids": torch.full_like(PROMPT, 3)}
    expected = target.generate(PROMPT, **options)
    drafter = make_oracle(tiny_drafter("pard", tiny_target("llama")), expected[0], [0.8] * 4)
    assert torch.equal(target.generate(PROMPT, assistant_model=drafter, **options), expected)


def test_ways_that_drop_the_drafter_say_so(monkeypatch):
    target, said = tiny_target("llama"), []
    drafter = tiny_drafter("pard", target)
    monkeypatch.setattr(hooks.logger, "warning_once", said.append)
    drafted(target, drafter, custom_generate=lambda model, input_ids, **kwargs: input_ids)
    assert ["custom_generate" in text for text in said] == [True]
    monkeypatch.setitem(hooks._originals, "generate_batch", lambda self, inputs, **kwargs: {})
    assert target.generate_batch([[1, 2]], assistant_model=drafter) == {}
    assert ["generate_batch" in text for text in said] == [False, True]
    assert target.generate_batch([[1, 2]], assistant_model="someone/drafter") == {}
    assert said.pop() == said[-1]
    assert target.generate_batch([[1, 2]]) == {}
    target.generate(PROMPT, custom_generate=lambda model, input_ids, **kwargs: input_ids, **OPTIONS)
    assert len(said) == 2
    assert GenerationMixin.generate_batch is hooks.generate_batch
