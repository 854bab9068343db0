"""What a drafter remembers of its training, and the one warning when a call differs from it."""

import copy
import json
import warnings

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, ProcessorMixin

from hf_pardraft import AutoDrafter, DFlareDrafter, DFlashDrafter, PardDrafter
from hf_pardraft.pairing.remembered import tokenizer_hash, warn_by_this_prompt
from tiny_models import random_prompt, tiny_drafter, tiny_target

KINDS = ("pard", "dflash", "dflare", "dart", "pard2")
# As Qwen3's: without thinking, an empty block of thoughts stands before the answer.
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": "add a and b"}]


@pytest.fixture(scope="module")
def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<think>", "</think>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["add a and b"], trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=TEMPLATE, pad_token="</s>")


@pytest.fixture(scope="module")
def target(tokenizer):
    return tiny_target("qwen3", vocab_size=300)


class Processor(ProcessorMixin):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer


def prompt_of(tokenizer, **kwargs) -> torch.LongTensor:
    return tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", **kwargs)["input_ids"]


def warnings_of(target, drafter, input_ids, **kwargs) -> list[str]:
    """What one short `generate` call warns of, this package's warnings only."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            assistant_model=drafter,
            generation_config=GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0),
            **kwargs,
        )
    return [str(w.message) for w in caught if "was not trained" in str(w.message)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_training_notes_is_saved_with_the_drafter(target, tokenizer, tmp_path, kind):
    drafter = tiny_drafter(kind, target)
    target.config._commit_hash = "0123456789abcdef"
    drafter.note_target(target, tokenizer, {"enable_thinking": False})
    del target.config._commit_hash
    drafter.config.target_name_or_path = "someone/target"
    drafter.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    config = AutoDrafter.from_pretrained(tmp_path).config
    for fields in (saved, config.to_dict()):
        assert fields["target_name_or_path"] == "someone/target"
        assert fields["target_revision"] == "0123456789abcdef"
        assert fields["target_model_type"] == "qwen3"
        assert fields["tokenizer_hash"] == tokenizer_hash(tokenizer)
        assert fields["chat_format"]["template_kwargs"] == {"enable_thinking": False}
        assert fields["chat_format"]["prompt_end"] == "<s>assistant: <think></think>"
    taps = {"dflash": "target_layer_ids", "dflare": "target_layer_ids", "dart": "tapped_hidden_states"}
    assert kind == "pard" or saved[taps.get(kind, "pard2_target_layers")]
    assert tokenizer.decode(config.chat_format["prompt_end_ids"]) == "<s>assistant: <think></think>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", ["native", "stock"])
def test_another_chat_mode_is_told_from_the_prompt_once(target, tokenizer, kind, loop):
    drafter = tiny_drafter(kind, target)
    drafter.generation_config.decode_loop = loop
    drafter.note_target(target, tokenizer, {"enable_thinking": False})
    assert warnings_of(target, drafter, prompt_of(tokenizer, enable_thinking=False)) == []
    (found,) = warnings_of(target, drafter, prompt_of(tokenizer))
    assert "<think></think>" in found
    assert "{'enable_thinking': False}" in found
    assert warnings_of(target, drafter, prompt_of(tokenizer)) == []


def test_a_mode_whose_end_begins_like_the_trained_one_is_another_mode(target, tokenizer):
    drafter = tiny_drafter("dflash", target)
    drafter.note_target(target, tokenizer, {})
    assert drafter.config.chat_format["prompt_end"] == "<s>assistant: "
    assert warnings_of(target, drafter, prompt_of(tokenizer)) == []
    assert len(warnings_of(target, drafter, prompt_of(tokenizer, enable_thinking=False))) == 1


def test_a_prompt_without_a_chat_template_is_another_mode(target, tokenizer):
    drafter = tiny_drafter("dflash", target)
    drafter.note_target(target, tokenizer, {})
    (found,) = warnings_of(target, drafter, random_prompt(3))
    assert "no chat template" in found


def test_a_call_that_goes_on_with_an_answer_is_judged_by_its_prompt(target, tokenizer):
    drafter, other = tiny_drafter("dflash", target), tiny_drafter("dflash", target)
    for each in (drafter, other):
        each.note_target(target, tokenizer, {})
    warn_by_this_prompt(drafter, prompt_of(tokenizer))
    assert warnings_of(target, drafter, random_prompt(3)) == []
    with pytest.warns(UserWarning, match="ends otherwise"):
        warn_by_this_prompt(other, random_prompt(3))


def test_every_row_of_a_batch_is_looked_at(target, tokenizer):
    drafter = tiny_drafter("dflash", target)
    drafter.note_target(target, tokenizer, {})
    good = prompt_of(tokenizer)
    assert warnings_of(target, drafter, torch.cat([good, good])) == []
    assert len(warnings_of(target, drafter, torch.cat([good, random_prompt(good.shape[1])]))) == 1


def test_a_tokenizer_that_a_call_passes_is_compared(target, tokenizer):
    drafter = tiny_drafter("pard", target)
    drafter.note_target(target, tokenizer, {})
    prompt = prompt_of(tokenizer)
    assert warnings_of(target, drafter, prompt, tokenizer=tokenizer) == []
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), chat_template=TEMPLATE + "\n"
    )
    (found,) = warnings_of(target, drafter, prompt, tokenizer=Processor(other))
    assert "another template" in found
    other.add_tokens(["<another>"])
    (found,) = warnings_of(target, drafter, prompt, tokenizer=other)
    assert "another vocabulary" in found


def test_another_fine_tune_of_the_target_warns_once(target, tokenizer):
    drafter = tiny_drafter("dflash", target)
    drafter.note_target(target, tokenizer)
    tuned = tiny_target("qwen3", seed=5, vocab_size=300)
    (found,) = warnings_of(tuned, drafter, random_prompt(4))
    assert "its weights differ" in found
    assert warnings_of(tuned, drafter, random_prompt(4)) == []


def test_weights_that_are_quantised_are_compared_with_nothing(target, tokenizer):
    drafter = tiny_drafter("dflash", target)
    quantised = tiny_target("qwen3", seed=5, vocab_size=300)
    quantised.config.quantization_config = {"quant_method": "fp8"}
    assert warnings_of(quantised, drafter, random_prompt(4)) == []
    del quantised.config.quantization_config
    assert len(warnings_of(quantised, copy.deepcopy(drafter), random_prompt(4))) == 1


def test_another_revision_warns_where_weights_can_not_be_compared(target, tokenizer, monkeypatch):
    # A copy, since the drafter was compared with this target when it was made.
    drafter = copy.deepcopy(tiny_drafter("dflash", target))
    drafter.config.update({"target_fingerprint": None, "target_revision": "a" * 40, "target_name_or_path": "someone/t"})
    monkeypatch.setattr(target, "name_or_path", "someone/t")
    monkeypatch.setattr(target.config, "_commit_hash", "b" * 40, raising=False)
    (found,) = warnings_of(target, drafter, random_prompt(4))
    assert "revision aaaaaaaaaaaa of someone/t" in found
    assert "revision bbbbbbbbbbbb" in found


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_remembers_nothing_is_silent(target, tokenizer, kind):
    drafter = tiny_drafter(kind, target)
    drafter.config.update({"target_fingerprint": None, "target_name_or_path": None, "target_model_type": None})
    other = tiny_target("qwen3", seed=5, vocab_size=300)
    assert warnings_of(other, drafter, random_prompt(4), tokenizer=tokenizer) == []


def test_a_fresh_drafter_remembers_the_tokenizer_that_its_mask_token_is_free_in(target, tokenizer):
    drafters = (
        PardDrafter.from_causal_lm(target, tokenizer=tokenizer),
        DFlashDrafter.for_target(target, 1, 4, tokenizer=tokenizer),
        DFlareDrafter.for_target(target, 1, 4, tokenizer=tokenizer),
    )
    for drafter in drafters:
        assert drafter.config.tokenizer_hash == tokenizer_hash(tokenizer)
        drafter.note_target(target)
        assert drafter.config.tokenizer_hash == tokenizer_hash(tokenizer)


def test_chats_without_a_template_are_refused(target, tokenizer):
    drafter = tiny_drafter("pard", target)
    with pytest.raises(ValueError, match=r"chat_template_kwargs=\{\}.*no tokenizer was passed"):
        drafter.note_target(target, chat_template_kwargs={})
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="this tokenizer has no chat template"):
        drafter.note_target(target, bare, {})
    drafter.note_target(target, bare)
    assert (drafter.config.tokenizer_hash, drafter.config.chat_format) == (tokenizer_hash(bare), None)
