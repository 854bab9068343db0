"""In a batch, a caller's own processors and stopping criteria see what plain `generate` shows them, call for call."""

import pytest
import torch
from transformers import LogitsProcessor, SequenceBiasLogitsProcessor, StoppingCriteria, SynthIDTextWatermarkingConfig

from tiny_models import batch_oracle, ragged_prompts, tiny_target

NEW = 24
LENGTHS = (12, 7, 9)
ENDS = [5, 9, 13, 20, 33]


class StopsAll(StoppingCriteria):
    """Stops all items once two texts end alike, counted over all calls."""

    def __init__(self):
        self.calls, self.count = [], 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.clone(), None if scores is None else len(scores)))
        self.count += int((input_ids[:, -1] % 2 == 0).sum() >= 2)
        return torch.full((len(input_ids),), self.count >= 6, dtype=torch.bool)


class Remembers(LogitsProcessor):
    """Lifts another token at each call, and mixes one item's scores into the next."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.clone(), scores.clone()))
        scores = scores + 0.3 * scores.roll(1, dims=0)
        scores[:, 7 * len(self.calls) % 60] += 3
        return scores


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("budget", "ends"), [(0, ENDS), (8, None), (8, ENDS)])
@pytest.mark.parametrize("who", ["processor", "criterion", "both"])
def test_callers_own_see_each_token_of_the_whole_batch_once(who, budget, ends, do_sample):
    target, (ids, mask) = tiny_target("llama"), ragged_prompts(LENGTHS)
    seen, outputs, drafter = [], [], None
    for _ in range(2):
        processors = [Remembers()] if who != "criterion" else []
        criteria = [StopsAll()] if who != "processor" else []
        torch.manual_seed(3)
        outputs.append(
            target.generate(
                ids,
                attention_mask=mask,
                do_sample=do_sample,
                max_new_tokens=NEW,
                eos_token_id=ends,
                pad_token_id=0,
                logits_processor=processors,
                stopping_criteria=criteria,
                return_dict_in_generate=True,
                output_scores=True,
                assistant_model=drafter,
            )
        )
        seen.append((processors, criteria))
        drafter = drafter or batch_oracle("dflash" if budget else "pard", target, outputs[0].sequences, mask, budget)
    # Sampled text, too, since each token is drawn for the whole batch at once.
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for expected, found in zip(outputs[0].scores, outputs[1].scores, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for expected, found in zip(seen[0][0], seen[1][0], strict=True):
        for (text, scores), (own_text, own_scores) in zip(expected.calls, found.calls, strict=True):
            assert torch.equal(text, own_text)
            torch.testing.assert_close(own_scores, scores, atol=1e-4, rtol=1e-4)
    for expected, found in zip(seen[0][1], seen[1][1], strict=True):
        for (text, count), (own_text, own_count) in zip(expected.calls, found.calls, strict=True):
            assert torch.equal(text, own_text)
            assert count == own_count
    assert drafter.last_stats.tau > (1.0 if who == "criterion" else 1.1)


class Views(LogitsProcessor):
    """Looks at what it gets as numbers that lie one after another in memory."""

    def __call__(self, input_ids, scores):
        return (scores.view(-1) + input_ids.view(-1)[-1] % 3).view(scores.shape)


@pytest.mark.parametrize("budget", [0, 8])
def test_texts_lie_in_memory_as_in_plain_generate(budget):
    target, (ids, mask) = tiny_target("llama"), ragged_prompts(LENGTHS)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW}
    expected = target.generate(ids, logits_processor=[Views()], **options)
    drafter = batch_oracle("pard", target, expected, mask, budget)
    found = target.generate(ids, assistant_model=drafter, logits_processor=[Views()], **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("budget", [0, 8])
def test_marks_and_guidance_of_transformers_keep_their_state_for_a_batch(budget):
    target, (ids, mask) = tiny_target("llama"), ragged_prompts((8, 8))
    for options in (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3), "do_sample": True},
        {"guidance_scale": 1.5, "do_sample": False},
    ):
        options = {"attention_mask": mask, "max_new_tokens": 14, **options}
        torch.manual_seed(0)
        expected = target.generate(ids, **options)
        drafter = batch_oracle("pard", target, expected, mask, budget)
        torch.manual_seed(0)
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
        assert drafter.last_stats.tau > 1.2


def test_items_advance_apart_beside_processors_that_are_known():
    target, (ids, mask) = tiny_target("llama"), ragged_prompts(LENGTHS)
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW, "repetition_penalty": 1.2}
    options["logits_processor"] = [SequenceBiasLogitsProcessor([[[12], 2.0]])]
    expected = target.generate(ids, **options)
    drafter = batch_oracle("pard", target, expected, mask, 0)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    per_round = drafter.last_stats.tokens_per_round
    assert len({tuple(per_round[i : i + 3]) for i in range(0, 9, 3)} - {(n, n, n) for n in range(1, 6)}) > 0


def test_an_adapter_for_each_item_stays_with_it():
    peft = pytest.importorskip("peft")
    target, (ids, mask) = tiny_target("llama"), ragged_prompts(LENGTHS)
    model = peft.get_peft_model(target, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False), "one")
    model.add_adapter("two", peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    options = {
        "attention_mask": mask,
        "do_sample": False,
        "max_new_tokens": 16,
        "eos_token_id": ENDS,
        "pad_token_id": 0,
    }
    options["adapter_names"] = ["one", "two", "__base__"]
    expected = model.eval().generate(input_ids=ids, **options)
    drafter = batch_oracle("pard", target, expected, mask, 0)
    assert torch.equal(model.generate(input_ids=ids, assistant_model=drafter, **options), expected)
