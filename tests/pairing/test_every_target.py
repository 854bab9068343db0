"""A drafter for a target of any architecture: it fits, or one sentence says why there can be none."""

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from architecture_cases import VOCAB_SIZE, meta_model, registered, tiny_model
from hf_pardraft import DartDrafter, DFlareDrafter, DFlashDrafter, PardDrafter
from hf_pardraft.pairing.architecture import rope_like
from hf_pardraft.pairing.target_checks import num_layer_outputs, state_recorder
from tiny_models import tiny_target

FRESH = {
    "dflash": lambda target: DFlashDrafter.for_target(target, num_layers=1, block_size=4, mask_token_id=63),
    "dflare": lambda target: DFlareDrafter.for_target(target, num_layers=1, block_size=4, mask_token_id=63),
    "dart": lambda target: DartDrafter.for_target(target, draft_length=3),
    "pard2": lambda target: PardDrafter.from_causal_lm(
        tiny_target("llama", num_hidden_layers=1, vocab_size=VOCAB_SIZE), mask_token_id=63, target=target
    ),
}
# Those whose outputs are not one vector per token and layer, which only a forward shows.
SEVERAL_STREAMS = ("deepseek_v4", "hy_v4", "qwen4_exp_text")
# A target-bound drafter was refused with a KeyError, or drafted with an IndexError.
MENDED = ("beam", "hrm_text", "longcat_flash", "whisper")
# transformers itself can't build these as a causal LM from such fields, or not without another package.
UNBUILT = {"gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}
BUILT = sorted(registered().keys() - UNBUILT)
PROMPT = torch.tensor([[5, 9, 33, 12, 40, 7]])


@pytest.mark.parametrize("name", BUILT)
def test_every_causal_lm_gets_a_drafter_or_one_sentence(name):
    target = meta_model(name)
    for kind, make in FRESH.items():
        try:
            drafter = make(target)
        except ValueError as refusal:
            message = str(refusal)
            assert type(target).__name__ in message
            assert "\n" not in message
        else:
            assert state_recorder(target) is not None
            assert all(-num_layer_outputs(target) < tap < num_layer_outputs(target) for tap in drafter.taps_for(target))
            assert kind == "pard2" or drafter.config.head_dim % 2 == 0


@pytest.mark.parametrize("name", BUILT)
def test_pard_adapts_three_architectures_and_names_them_to_all_others(name):
    model = meta_model(name)
    if model.config.model_type in ("llama", "qwen2", "qwen3"):
        assert PardDrafter.from_causal_lm(model, mask_token_id=63).config.pard_token == 63
    else:
        with pytest.raises(
            ValueError, match=f"is a llama, qwen2, qwen3 causal LM, got model_type '{model.config.model_type}'"
        ):
            PardDrafter.from_causal_lm(model, mask_token_id=63)


@pytest.mark.parametrize("kind", FRESH)
@pytest.mark.parametrize("name", MENDED)
def test_a_drafter_reads_layers_as_the_target_counts_them(name, kind):
    target = tiny_model(name)
    with torch.no_grad():
        states = target(input_ids=PROMPT, output_hidden_states=True).hidden_states
    assert len(states) == num_layer_outputs(target) + 1
    drafter = FRESH[kind](target)
    plain = target.generate(PROMPT, max_new_tokens=8, do_sample=False)
    drafted = target.generate(PROMPT, max_new_tokens=8, do_sample=False, assistant_model=drafter)
    assert torch.equal(drafted, plain)
    assert drafter.last_stats.rounds > 0


@pytest.mark.parametrize("kind", FRESH)
@pytest.mark.parametrize("name", SEVERAL_STREAMS)
def test_several_hidden_states_per_token_are_seen_before_a_drafter_is_made(name, kind):
    target = tiny_model(name)
    with pytest.raises(ValueError, match=r"reads one hidden state of size 32 per token .* states of shape"):
        FRESH[kind](target)


@pytest.mark.parametrize("kind", FRESH)
def test_layers_that_are_left_out_without_an_image_are_seen_before_a_drafter_is_made(kind):
    target = tiny_model("mllama")
    with pytest.raises(ValueError, match="3 of 4 layers' outputs: use a drafter that reads token ids only"):
        FRESH[kind](target)


@pytest.mark.parametrize("name", ["bloom", "mpt", "mamba", "mamba2", "rwkv", "cpmant"])
@pytest.mark.parametrize("kind", FRESH)
def test_targets_without_selectable_states_are_refused_whatever_their_config_calls_its_fields(name, kind):
    with pytest.raises(ValueError, match="can't select hidden states"):
        FRESH[kind](meta_model(name))


NARROW = {"electra": {"embedding_size": 16}, "opt": {"word_embed_proj_dim": 16}}


@pytest.mark.parametrize("kind", ["dflash", "dflare", "dart"])
@pytest.mark.parametrize("name", NARROW)
def test_an_embedding_narrower_than_the_layers_is_refused_by_for_target_and_by_generate(name, kind):
    expected = "borrows the target's embedding, .* has one of 16 for layers of 32"
    narrow = tiny_model(name, NARROW[name])
    with pytest.raises(ValueError, match=expected):
        FRESH[kind](narrow)
    drafter = FRESH[kind](tiny_model(name))
    with pytest.raises(ValueError, match=expected):
        narrow.generate(PROMPT, max_new_tokens=4, assistant_model=drafter)


def test_pard2_does_without_the_embedding_of_its_target():
    base = tiny_target("llama", num_hidden_layers=1, vocab_size=VOCAB_SIZE)
    electra, opt = (tiny_model(name, overrides) for name, overrides in NARROW.items())
    # OPT narrows what comes after its final norm, too.
    with pytest.raises(ValueError, match=r"states of shape \(1, 1, 16\)"):
        PardDrafter.from_causal_lm(base, mask_token_id=63, target=opt)
    for target, layers in ((electra, None), (opt, [-2, -3])):
        drafter = PardDrafter.from_causal_lm(base, mask_token_id=63, target=target, target_layers=layers)
        plain = target.generate(PROMPT, max_new_tokens=6, do_sample=False)
        assert torch.equal(target.generate(PROMPT, max_new_tokens=6, do_sample=False, assistant_model=drafter), plain)


def test_dflash_needs_the_target_s_head_and_dart_does_not(monkeypatch):
    target = tiny_target("qwen3")
    monkeypatch.setattr(type(target), "get_output_embeddings", lambda self: None)
    assert FRESH["dart"](target).config.vocab_size == 64
    for kind in ("dflash", "dflare"):
        with pytest.raises(ValueError, match=r"has none \(get_output_embeddings is None\)"):
            FRESH[kind](target)


def test_a_head_of_another_width_is_refused():
    target = tiny_target("qwen3")
    target.lm_head = torch.nn.Linear(48, 64)
    with pytest.raises(ValueError, match=r"borrows the target's head, .* has one of 48 for layers of 32"):
        FRESH["dflash"](target)


@pytest.mark.parametrize("kind", FRESH)
def test_encoder_decoders_are_refused(kind):
    config = T5Config(vocab_size=64, d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8)
    with pytest.raises(ValueError, match="drafters work with decoder-only targets, and T5ForConditionalGeneration"):
        FRESH[kind](T5ForConditionalGeneration(config))


DEFAULT = {"rope_type": "default", "rope_theta": 5000.0}
LONG = {"rope_type": "longrope", "rope_theta": 5000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (DEFAULT, DEFAULT),
        ({"rope_theta": 5000.0}, DEFAULT),
        ({"rope_type": "default"}, {**DEFAULT, "rope_theta": 10000.0}),
        ({**DEFAULT, "partial_rotary_factor": 0.5}, DEFAULT),
        ({"sliding_attention": {"rope_theta": 1.0}, "full_attention": DEFAULT}, DEFAULT),
        ({"sliding_attention": DEFAULT, "full_attention": None}, DEFAULT),
        ({"full_attention": None}, {**DEFAULT, "rope_theta": 10000.0}),
        ({**DEFAULT, "rope_type": "linear", "factor": 2.0}, {**DEFAULT, "rope_type": "linear", "factor": 2.0}),
        ({**DEFAULT, "rope_type": "a family's own", "factor": 2.0}, DEFAULT),
        (LONG, LONG),
        ({**LONG, "long_factor": [2.0] * 3, "short_factor": [1.0] * 3}, DEFAULT),
        ({**LONG, "partial_rotary_factor": 0.5}, DEFAULT),
    ],
)
def test_a_drafter_takes_the_rope_of_its_target_where_it_fits_whole_heads(rope, expected):
    assert rope_like({"rope_parameters": rope}, head_dim=8) == expected


@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 8), (32, 2), (12, 2)])
def test_heads_are_as_wide_as_rotation_needs(num_heads, head_dim):
    target = meta_model("bert")
    target.config.num_attention_heads = num_heads
    drafter = DFlashDrafter.for_target(target, num_layers=1, mask_token_id=63)
    assert (drafter.config.num_attention_heads, drafter.config.head_dim) == (num_heads, head_dim)


@pytest.mark.parametrize(
    ("own_name", "length"), [("n_positions", 77), ("max_seq_len", 78), ("seq_length", 79), ("max_target_positions", 80)]
)
def test_the_target_s_length_is_found_under_the_names_that_families_give_it(own_name, length):
    target = tiny_target("llama")
    del target.config.max_position_embeddings
    setattr(target.config, own_name, length)
    assert DartDrafter.for_target(target).config.max_position_embeddings == length


@pytest.mark.parametrize("kind", ["dflash", "dflare", "dart"])
def test_asking_such_a_drafter_to_write_says_what_to_call(kind):
    target = tiny_target("qwen3")
    drafter = FRESH[kind](target)
    with pytest.raises(
        ValueError,
        match=r"no text by itself: import hf_pardraft, and call target.generate\(..., assistant_model=drafter\)",
    ):
        drafter.generate(PROMPT, max_new_tokens=4)
    assert not drafter.can_generate()
