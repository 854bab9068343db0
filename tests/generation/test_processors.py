"""Every processor that transformers ships for decoder-only targets: text and scores are plain `generate`'s, chain and tree."""

import random

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import logits_process

from hf_pardraft.generation.choosing.processors import PREFIX_FREE
from tiny_models import make_oracle, random_prompt, tiny_drafter, tiny_target

LONGEST = 24
PROMPT = random_prompt(6)
ENDS = [4, 11, 17, 23]

# By arguments of `generate`, each with the processors that it switches on.
ARGUMENTS = {
    "repetition_penalty": ({"repetition_penalty": 1.3}, "RepetitionPenalty"),
    "encoder_repetition_penalty": ({"encoder_repetition_penalty": 1.5}, "EncoderRepetitionPenalty"),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
    "encoder_no_repeat_ngram_size": ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGram"),
    "bad_words_ids": ({"bad_words_ids": [[5], [7, 9]]}, "NoBadWords"),
    "min_length": ({"min_length": 14, "eos_token_id": ENDS}, "MinLength"),
    "min_new_tokens": ({"min_new_tokens": 10, "eos_token_id": ENDS}, "MinNewTokensLength"),
    "prefix_allowed_tokens_fn": (
        {"prefix_allowed_tokens_fn": lambda row, text: [3, 9, 20 + int(text[-1]) % 7]},
        "PrefixConstrained",
    ),
    "forced_bos_token_id": ({"forced_bos_token_id": 9}, "ForcedBOSToken"),
    "forced_eos_token_id": ({"forced_eos_token_id": 8, "eos_token_id": 8}, "ForcedEOSToken"),
    "remove_invalid_values": ({"remove_invalid_values": True}, "InfNanRemove"),
    "exponential_decay_length_penalty": (
        {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 8},
        "ExponentialDecayLengthPenalty",
    ),
    "sequence_bias": ({"sequence_bias": [[[12], 4.0], [[3, 5], -6.0]]}, "SequenceBias"),
    "suppress_tokens": ({"suppress_tokens": [6, 7, 8]}, "SuppressTokens"),
    "begin_suppress_tokens": ({"begin_suppress_tokens": [9, 20]}, "SuppressTokensAtBegin"),
    "renormalize_logits": ({"renormalize_logits": True}, "LogitNormalization"),
    "guidance_scale": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
    "watermarking_config": ({"watermarking_config": WatermarkingConfig(bias=3.0)}, "Watermark"),
    "synthid": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)},
        "SynthIDTextWatermark",
    ),
}
# `generate` uses these for sampling only; as processors of one's own they work on greedy text as well.
WARPERS = {
    "Temperature": (0.6,),
    "TopK": (5,),
    "TopP": (0.7,),
    "TopH": (0.5,),
    "MinP": (0.1,),
    "Typical": (0.6,),
    "Epsilon": (0.02,),
    "Eta": (0.02,),
}
# For encoder-decoders, audio codecs, and models with a `generate` of their own.
OF_OTHER_MODELS = {
    "AlternatingCodebooks",
    "BarkEosPrioritizer",
    "ClassifierFreeGuidance",
    "DiaClassifierFreeGuidance",
    "DiaEOSChannelFilter",
    "DiaEOSDelayPattern",
    "WhisperNoSpeechDetection",
    "WhisperTimeStamp",
}


def short_name(name):
    return name.removesuffix("LogitsProcessor").removesuffix("LogitsWarper").removesuffix("Processor")


def options_of(name):
    if name in ARGUMENTS:
        return ARGUMENTS[name][0]
    return {"logits_processor": [getattr(logits_process, f"{name}LogitsWarper")(*WARPERS[name])]}


def combination(seed):
    """Arguments and warpers for several processors at once."""
    dice = random.Random(seed)
    # Both watermarks are set by one argument, and a text that must end cannot be forced to go on.
    names = dice.sample(sorted(set(ARGUMENTS) - {"synthid", "forced_eos_token_id"}), 4)
    warpers = [options_of(name)["logits_processor"][0] for name in dice.sample(sorted(WARPERS), 2)]
    return {**{key: value for name in names for key, value in options_of(name).items()}, "logits_processor": warpers}


def assert_like_plain_generate(options, budget, kind="pard"):
    target = tiny_target("llama")
    call = {
        "attention_mask": torch.ones_like(PROMPT),
        "do_sample": False,
        "max_new_tokens": LONGEST,
        "output_scores": True,
        "return_dict_in_generate": True,
        **options,
    }
    expected = target.generate(PROMPT, **call)
    drafter = make_oracle(tiny_drafter(kind, target), expected.sequences[0], [0.7] * 4, runner_up=0.8)
    drafter.generation_config.tree_budget = budget
    found = target.generate(PROMPT, assistant_model=drafter, **call)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.scores) == len(expected.scores)
    for ours, plain in zip(found.scores, expected.scores, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    return drafter.last_stats


@pytest.mark.parametrize("budget", [0, 14])
@pytest.mark.parametrize("name", [*ARGUMENTS, *WARPERS])
def test_a_processor_changes_text_and_scores_as_in_plain_generate(name, budget):
    assert assert_like_plain_generate(options_of(name), budget).rounds > 0


@pytest.mark.parametrize("budget", [0, 14])
@pytest.mark.parametrize("kind", ["pard", "dflash"])
@pytest.mark.parametrize("seed", range(6))
def test_processors_work_together(seed, kind, budget):
    assert_like_plain_generate(combination(seed), budget, kind)


def test_runs_are_accepted_under_processors_too():
    """Otherwise the tests above would say little."""
    for name in ("repetition_penalty", "no_repeat_ngram_size", "guidance_scale", "Temperature"):
        for budget in (0, 14):
            assert assert_like_plain_generate(options_of(name), budget).tau > 1.5


def test_no_processor_that_transformers_ships_is_left_out():
    shipped = {
        short_name(name)
        for name, value in vars(logits_process).items()
        if isinstance(value, type) and issubclass(value, logits_process.LogitsProcessor)
    }
    assert shipped - {""} == {name for _, name in ARGUMENTS.values()} | set(WARPERS) | OF_OTHER_MODELS


def test_only_warpers_and_the_like_are_run_for_all_nodes_at_once():
    """What reads no prefix, by the text of its own implementation, is known, and nothing else is."""
    names = {short_name(processor.__name__) for processor in PREFIX_FREE}
    assert names == {*WARPERS, "InfNanRemove", "LogitNormalization", "SuppressTokens"}
