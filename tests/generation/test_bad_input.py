"""Bad input is refused, in words that help, before the target runs."""

import copy
import warnings

import pytest
import torch
from accelerate import cpu_offload
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    FalconConfig,
    GPTNeoConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer

from hf_pardraft import DFlareDrafter, DFlashConfig, DFlashDrafter, PardConfig, PardDrafter
from tiny_models import MASK_TOKEN_ID, make_oracle, random_prompt, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


def assert_refused(target, drafter, match, **options):
    """`generate` raises before any forward of the target."""
    calls = []
    handle = target.register_forward_pre_hook(lambda *_: calls.append(1))
    prompt = options.pop("prompt", random_prompt(4))
    try:
        with pytest.raises(ValueError, match=match):
            target.generate(prompt, assistant_model=drafter, max_new_tokens=4, **options)
    finally:
        handle.remove()
    assert not calls


def test_a_target_without_tap_support(target):
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=4, n_head=4, pad_token_id=0))
    assert_refused(bloom, tiny_drafter("dflash", target), "can't select hidden states")


OWN_MASKS = {
    "gpt_neo": GPTNeoConfig(attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4, window_size=4),
    "falcon_alibi": FalconConfig(alibi=True, num_hidden_layers=2, num_attention_heads=4),
}


@pytest.mark.parametrize("name", OWN_MASKS)
def test_trees_and_batches_of_a_target_that_makes_its_own_masks(target, name):
    """Their windows and biases count the columns of the cache, whatever mask they are given."""
    config = copy.deepcopy(OWN_MASKS[name])
    config.update({"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None})
    other, drafter = AutoModelForCausalLM.from_config(config).eval(), tiny_drafter("pard", target)
    assert_refused(other, drafter, "masks and positions", prompt=random_prompt(4).repeat(2, 1))
    prompt = random_prompt(9)
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 12}
    expected = other.generate(prompt, **options)
    assert torch.equal(other.generate(prompt, assistant_model=drafter, **options), expected)
    drafter.generation_config.tree_budget = 4
    assert_refused(other, drafter, "masks and positions")


def test_a_drafter_of_another_vocabulary(target):
    other = tiny_target("qwen3", vocab_size=80)
    assert_refused(target, tiny_drafter("pard", other), "vocabulary mismatch.*80.*64.*resize_token_embeddings")
    assert_refused(target, tiny_drafter("dflash", other), "vocabulary mismatch.*80.*64")


def test_taps_beyond_the_target(target):
    shallow = tiny_target("qwen3", num_hidden_layers=2)
    drafter = DFlashDrafter.for_target(target, 2, 4, mask_token_id=MASK_TOKEN_ID, target_layer_ids=[0, 2])
    assert_refused(shallow, drafter, "made for a deeper target")


@pytest.mark.parametrize("layers", [[0, 3], [3]])
def test_a_tap_on_the_post_norm_output(target, layers):
    with pytest.raises(ValueError, match="after the final norm"):
        DFlashDrafter.for_target(target, 2, 4, mask_token_id=MASK_TOKEN_ID, target_layer_ids=layers)
    deeper = tiny_target("qwen3", num_hidden_layers=5)
    drafter = DFlashDrafter.for_target(deeper, 2, 4, mask_token_id=MASK_TOKEN_ID, target_layer_ids=layers)
    assert_refused(target, drafter, "after the final norm")


def test_a_drafter_of_another_hidden_size(target):
    wider = tiny_target("qwen3", hidden_size=48)
    assert_refused(target, tiny_drafter("dflash", wider), "hidden size 48.*size 32")


def test_layers_are_tapped_by_their_numbers(target):
    for drafter_class in (DFlashDrafter, DFlareDrafter):
        with pytest.raises(ValueError, match=r"0-based.*got \[-1, 1\]"):
            drafter_class.for_target(target, 2, 4, mask_token_id=MASK_TOKEN_ID, target_layer_ids=[-1, 1])


def test_a_target_whose_recurrent_layers_start_anew(target):
    config = MiniMaxConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
    )
    assert_refused(MiniMaxForCausalLM(config), tiny_drafter("pard", target), "minimax")


def test_an_encoder_decoder_target(target):
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=8))
    assert_refused(t5, tiny_drafter("pard", target), "encoder-decoder")


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"use_cache": False}, "use_cache=True"),
        ({"cache_implementation": "offloaded"}, "an offloaded cache goes back and forth"),
    ],
)
def test_generate_options_that_drafting_can_not_serve(target, kind, options, match):
    assert_refused(target, tiny_drafter(kind, target), match, **options)


def test_a_cache_that_leaves_nothing_to_read(target):
    cache = DynamicCache(config=target.config)
    target(random_prompt(5), past_key_values=cache)
    drafter = tiny_drafter("pard", target)
    assert_refused(target, drafter, "5 tokens and input_ids 5", prompt=random_prompt(5), past_key_values=cache)


def rounded(update):
    """An `update` that stores less than it is given."""

    def stored(self, keys, values, *args, **kwargs):
        return update(self, keys.round(decimals=1), values.round(decimals=1), *args, **kwargs)

    return stored


class Rounds(DynamicCache):
    update = rounded(DynamicCache.update)


class RoundsInLayers(DynamicLayer):
    update = rounded(DynamicLayer.update)


class Named(DynamicCache):
    """Stores what any other does."""

    name = "mine"


def with_layers(layers=None, **attributes):
    cache = DynamicCache()
    cache.layers = layers or []
    vars(cache).update(attributes)
    return cache


@pytest.mark.parametrize(
    "make",
    [
        Rounds,
        lambda: with_layers([RoundsInLayers() for _ in range(4)]),
        lambda: with_layers(layer_class_to_replicate=RoundsInLayers),
        lambda: with_layers(update=rounded(DynamicCache.update)),
    ],
    ids=["cache", "layers", "layers to come", "instance"],
)
def test_a_cache_that_stores_entries_in_its_own_way(target, make):
    drafter, options = tiny_drafter("pard", target), {"do_sample": False, "max_new_tokens": 4}
    assert_refused(target, drafter, "stores them in another way", past_key_values=make())
    # One that has a name besides is as good as any.
    expected = target.generate(random_prompt(4), **options)
    found = target.generate(random_prompt(4), past_key_values=Named(), assistant_model=drafter, **options)
    assert torch.equal(found, expected)


def test_drafts_in_the_stock_loop_are_chains_that_match(target):
    for settings in ({"tree_budget": 4}, {"verification": "rejection"}):
        drafter = tiny_drafter("pard", target)
        for name, value in {"decode_loop": "stock", **settings}.items():
            setattr(drafter.generation_config, name, value)
        assert_refused(target, drafter, "decode_loop='stock'")


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart", "pard2"])
def test_a_drafter_without_weights(target, kind):
    assert_refused(target, tiny_drafter(kind, target).to("meta"), "meta device")


@pytest.mark.parametrize(
    ("setting", "value", "match"),
    [
        ("decode_loop", "fast", "decode_loop must be one of"),
        ("verification", "hope", "verification must be one of"),
        ("tree_budget", -1, "tree_budget must be a whole number"),
        ("tree_budget", 2.5, "tree_budget must be a whole number"),
        ("tree_beam_width", 0, "tree_beam_width must be a whole number"),
        ("tree_top_k", 0, "tree_top_k must be a whole number"),
        ("num_assistant_tokens", 0, "between 1 and"),
        ("num_assistant_tokens", 9, "between 1 and 4"),
    ],
)
def test_settings_out_of_range(target, setting, value, match):
    drafter = tiny_drafter("dflash", target)
    setattr(drafter.generation_config, setting, value)
    assert_refused(target, drafter, match)


def test_a_missing_mask_token():
    with pytest.raises(ValueError, match="needs pard_token"):
        PardDrafter(PardConfig(model_type="qwen3", vocab_size=64, hidden_size=32))
    with pytest.raises(ValueError, match="needs mask_token_id"):
        DFlashDrafter(DFlashConfig(vocab_size=64, num_target_layers=8))


def test_another_target_than_the_trained_one_warns_once(target):
    drafter = tiny_drafter("dflash", target)
    prompt, other = random_prompt(4), tiny_target("qwen3", seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(prompt, assistant_model=drafter, max_new_tokens=2)
    with pytest.warns(UserWarning, match="not trained for this target"):
        other.generate(prompt, assistant_model=drafter, max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.generate(prompt, assistant_model=drafter, max_new_tokens=2)


def test_the_same_target_in_another_dtype_does_not_warn(target):
    drafter = tiny_drafter("dflash", target)
    rounded = tiny_target("qwen3").to(torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rounded.generate(random_prompt(4), assistant_model=drafter, max_new_tokens=2)
    assert [str(warning.message) for warning in caught] == []


def test_a_pard_drafter_warns_for_another_family_only(target):
    drafter = tiny_drafter("pard", target)
    drafter.config.target_model_type = "qwen3"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_target("qwen3", seed=5).generate(random_prompt(4), assistant_model=drafter, max_new_tokens=2)
    with pytest.warns(UserWarning, match="model type 'qwen3'.*'llama'"):
        tiny_target("llama").generate(random_prompt(4), assistant_model=drafter, max_new_tokens=2)


def test_masked_out_tokens_inside_the_text_are_refused_where_windows_count_them():
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1, 1]])
    for architecture in ("gemma3", "llama"):
        target = tiny_target(architecture)
        drafter = tiny_drafter("pard", target)
        options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
        expected = target.generate(random_prompt(9), **options)
        if architecture == "llama":
            assert torch.equal(target.generate(random_prompt(9), assistant_model=drafter, **options), expected)
            continue
        with pytest.raises(ValueError, match="zeros inside the text"):
            target.generate(random_prompt(9), assistant_model=drafter, **options)


BY_COLUMNS = {
    "bloom": BloomConfig(n_layer=2, n_head=4),
    "bart": BartConfig(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48),
}


@pytest.mark.parametrize("name", BY_COLUMNS)
def test_a_target_that_counts_columns_takes_no_padding_nor_positions_of_a_caller(target, name):
    config = copy.deepcopy(BY_COLUMNS[name])
    config.update({"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None})
    other, drafter = AutoModelForCausalLM.from_config(config).eval(), tiny_drafter("pard", target)
    prompt, positions = random_prompt(6), torch.arange(6)[None]
    padded = {"prompt": prompt, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    assert_refused(other, drafter, "counts masked-out columns", **padded)
    assert_refused(other, drafter, "counts masked-out columns", position_ids=positions, **padded)
    # Its forward swallows them.
    batch = {"prompt": prompt.repeat(2, 1), "position_ids": positions.repeat(2, 1)}
    assert_refused(other, drafter, "need position_ids, which .* does not take", **batch)
    options = {"position_ids": positions, "do_sample": False, "max_new_tokens": 12}
    expected = other.generate(prompt, **options)
    drafter = make_oracle(drafter, expected[0], [0.9] * 4, runner_up=0.5)
    assert torch.equal(other.generate(prompt, assistant_model=drafter, **options), expected)


def test_a_forward_that_hides_position_ids_gets_those_of_a_caller():
    """As the forward that it overrides does."""

    class Wrapped(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    target = tiny_target("llama")
    target.__class__ = Wrapped
    options = {"position_ids": torch.arange(6).expand(2, 6), "do_sample": False, "max_new_tokens": 12}
    batch = torch.cat([random_prompt(6, seed=seed) for seed in (0, 1)])
    drafter = tiny_drafter("pard", target)
    assert torch.equal(target.generate(batch, assistant_model=drafter, **options), target.generate(batch, **options))


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        ([[0] * 6, [1] * 6], "got an empty prompt"),
        ([[1] * 6, [1] * 5 + [0]], "padded on the right"),
        ([[1] * 9] * 2, "input_ids has 6 columns and the attention_mask 9"),
        ([[1] * 4] * 2, "input_ids has 6 columns and the attention_mask 4"),
    ],
)
@pytest.mark.parametrize("kind", ["pard", "dflash"])
def test_a_mask_that_is_not_of_these_prompts(kind, mask, match):
    target = tiny_target("llama")
    ids = random_prompt(6).expand(2, -1)
    options = {"attention_mask": torch.tensor(mask), "max_new_tokens": 4, "pad_token_id": 0}
    with pytest.raises(ValueError, match=match):
        target.generate(ids, assistant_model=tiny_drafter(kind, target), **options)


@pytest.mark.parametrize("kind", ["pard", "pard2", "dflash", "dart"])
def test_an_offloaded_drafter_is_refused_with_what_to_do(kind, target):
    drafter = cpu_offload(tiny_drafter(kind, target), execution_device=torch.device("cpu"))
    assert_refused(target, drafter, "or are offloaded.* Load it whole with from_pretrained, onto one device")


def test_a_batch_of_no_texts_is_refused():
    target = tiny_target("llama")
    ids = torch.zeros(0, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="expected one text at least, got a batch of none"):
        target.generate(ids, attention_mask=ids, assistant_model=tiny_drafter("pard", target), max_new_tokens=3)
