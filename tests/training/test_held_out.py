"""The tau that an evaluation logs is the one that decoding has, and it can choose the best checkpoint."""

import pytest
import torch
from accelerate import cpu_offload
from transformers import TrainingArguments

from hf_pardraft import DecodeStats, DraftTrainer, DraftTrainingArguments
from hf_pardraft.training.held_out import Drafting, draft_from, held_out_prompts, prompt_of
from processes import in_processes
from tiny_models import make_oracle, tiny_drafter, tiny_target
from training.tiny_training import trainer_for

KINDS = ("pard", "dflash", "dflare", "dart", "pard2")


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, 4, 5]}, [1, 2, 3]),
        # Several turns: what comes before the first answer.
        ({"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, -100, 5]}, [1, 2]),
        # No prompt: the first half.
        ({"input_ids": [1, 2, 3, 4]}, [1, 2]),
        ({"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]}, [1, 2]),
        # Nothing to learn: all of it is context.
        ({"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}, [1, 2, 3]),
        ({"input_ids": [1, 2, 3, 9, 9], "labels": [-100, -100, 3, 9, 9], "document_ids": [0, 0, 0, 1, 1]}, [1, 2]),
        ({"input_ids": [5]}, None),
    ],
)
def test_a_prompt_is_what_comes_before_the_first_token_to_be_learned(example, expected):
    found = prompt_of(example)
    assert (None if found is None else found.tolist()) == expected


def test_prompts_lie_evenly_in_a_data_set_and_at_the_start_of_a_stream():
    rows = [{"input_ids": [index] * 4} for index in range(10)]
    assert [int(prompt[0]) for prompt in held_out_prompts(rows, 3)] == [0, 3, 6]
    assert [int(prompt[0]) for prompt in held_out_prompts(rows, 99)] == list(range(10))
    assert [int(prompt[0]) for prompt in held_out_prompts(iter(rows), 2)] == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_logged_is_the_tau_of_generate(kind, target, text, tmp_path):
    trainer = trainer_for(kind, target, text, tmp_path, max_steps=20, tau_prompts=3, tau_new_tokens=16)
    trainer.train()
    scores = trainer.evaluate()
    counts = []
    for example in (text[0], text[2], text[4]):
        prompt = torch.tensor([example["input_ids"][:4]])
        options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 16}
        target.generate(prompt, assistant_model=trainer.drafter, **options)
        counts += trainer.drafter.last_stats.tokens_per_round
    assert scores["eval_tau"] == pytest.approx(sum(counts) / len(counts), abs=1e-3)
    assert trainer.state.log_history[-1]["eval_tau"] == scores["eval_tau"]
    assert not target.training
    assert not any(parameter.requires_grad for parameter in target.parameters())


def test_an_oracle_has_the_tau_of_its_depth(target, text):
    ids = torch.tensor(text[0]["input_ids"])
    drafter = make_oracle(tiny_drafter("dflash", target), ids, [1.0] * 4)
    # The prefill commits one token, then five a round: 1 + 5 + 5.
    found = draft_from(target, drafter, [ids[:4]], 16).metrics()
    assert found["tau"] > 3.5
    assert (found["acceptance_1"], found["acceptance_4"]) == (1.0, 1.0)
    assert found["decoded_tokens_per_second"] > 0
    drafter.generation_config.tree_budget = 12
    assert "acceptance_5" not in draft_from(target, drafter, [ids[:4]], 16).metrics()


def counts_of(drafting: Drafting) -> tuple:
    return drafting.tokens, drafting.rounds, tuple(drafting.accepted.tolist())


def test_what_was_accepted_is_counted_by_position_over_processes():
    stats = DecodeStats()
    stats.add_round([4, 4], [4, 1], [5, 2])
    stats.add_round([2], [0], [1])
    drafting = Drafting()
    drafting.add(stats, seconds=2.0)
    # Two processes that counted the same.
    found = drafting.over_processes(lambda values: 2 * values).metrics()
    shares = [found.pop(f"acceptance_{k}") for k in (1, 2, 3, 4)]
    assert shares == [pytest.approx(share, abs=1e-4) for share in (2 / 3, 1 / 3, 1 / 2, 1 / 2)]
    assert shares == [pytest.approx(rate, abs=1e-4) for rate in stats.per_position_acceptance]
    assert found == {"tau": 2.6667, "decoded_tokens_per_second": 4.0}
    assert Drafting().metrics() == {"tau": 0.0}


def test_an_offloaded_target_is_drafted_for_as_if_it_were_in_one_place(target, text):
    prompts, drafter = held_out_prompts(text, 2), tiny_drafter("dflash", target)
    offloaded = cpu_offload(tiny_target("qwen3"))
    assert offloaded.device.type == "meta"
    assert counts_of(draft_from(offloaded, drafter, prompts, 8)) == counts_of(draft_from(target, drafter, prompts, 8))


def test_sampled_evaluations_compare_with_each_other(target, text):
    drafter = tiny_drafter("pard", target)
    prompts = held_out_prompts(text, 3)
    before = torch.get_rng_state()
    greedy, first, again, other = (
        counts_of(draft_from(target, drafter, prompts, 16, temperature, seed))
        for temperature, seed in ((0.0, 0), (1.0, 0), (1.0, 0), (1.0, 7))
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert first == again
    assert {greedy, first, other} != {first}


@pytest.mark.parametrize(
    "setting",
    [
        {"use_cache": False},
        {"num_beams": 4},
        {"num_return_sequences": 2},
        {"stop_strings": ["no tokenizer"]},
        {"repetition_penalty": 2.0, "suppress_tokens": [*range(30)]},
        {"eos_token_id": [7, 8]},
    ],
)
def test_of_the_targets_own_settings_an_evaluation_minds_what_ends_a_text_alone(setting, text):
    target = tiny_target("qwen3")
    prompts = held_out_prompts(text, 3)
    plain = counts_of(draft_from(target, tiny_drafter("dflash", target), prompts, 16))
    vars(target.generation_config).update(setting)
    before = target.generation_config.to_dict()
    found = counts_of(draft_from(target, tiny_drafter("dflash", target), prompts, 16))
    assert found == plain or (found[0] < plain[0] and "eos_token_id" in setting)
    assert target.generation_config.to_dict() == before


@pytest.mark.parametrize(
    ("taus", "best_step"), [([2.0, 3.5, 3.0], 4), ([1.0, 1.0, 1.0], 6), ([2.0, 2.0, 1.5], 4), ([2.0, 1.5, 2.0], 6)]
)
def test_the_best_checkpoint_is_the_latest_of_those_that_draft_best(taus, best_step, target, text, tmp_path):
    """Tau is a number to be raised, and what it measures is brought back at the end."""
    measured = iter(taus)
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_for(
        "dflash",
        target,
        text,
        tmp_path,
        load_best_model_at_end=True,
        metric_for_best_model="tau",
        tau_prompts=1,
        **settings,
    )
    trainer.measured_drafting = lambda examples: {"tau": next(measured)}
    trainer.train()
    assert trainer.args.greater_is_better
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best_step}")
    assert trainer.state.best_metric == max(taus)
    best = type(trainer.drafter).from_pretrained(tmp_path / f"checkpoint-{best_step}")
    assert all(torch.equal(best.state_dict()[name], weight) for name, weight in trainer.drafter.state_dict().items())


def test_every_evaluation_set_has_metrics_of_its_own(target, text, tmp_path):
    trainer = trainer_for("dflash", target, text, tmp_path, tau_prompts=1, tau_new_tokens=4)
    scores = trainer.evaluate({"easy": text.select([0, 1]), "hard": text.select([2, 3])})
    for name in ("loss", "tau", "expected_tau", "accuracy_1"):
        assert {f"eval_easy_{name}", f"eval_hard_{name}"} <= scores.keys()


def test_tau_can_not_choose_a_checkpoint_where_it_is_not_measured(target, text, tmp_path):
    settings = {"use_cpu": True, "metric_for_best_model": "tau"}
    with pytest.raises(ValueError, match="tau_prompts=0"):
        DraftTrainingArguments(tmp_path, tau_prompts=0, **settings)
    with pytest.raises(ValueError, match="pass target="):
        DraftTrainer(tiny_drafter("pard", target), args=DraftTrainingArguments(tmp_path, **settings))


@pytest.mark.parametrize("setting", [{"tau_prompts": -1}, {"tau_new_tokens": 0}, {"tau_temperature": -0.5}])
def test_settings_of_tau_out_of_range_are_refused(setting, tmp_path):
    with pytest.raises(ValueError, match=next(iter(setting))):
        DraftTrainingArguments(tmp_path, use_cpu=True, **setting)


def test_a_model_that_is_no_drafter_is_refused_with_advice(target, tmp_path):
    with pytest.raises(TypeError, match=r"got a Qwen3ForCausalLM.*PardDrafter.from_causal_lm"):
        DraftTrainer(target, target=target, args=DraftTrainingArguments(tmp_path, use_cpu=True))


def test_a_target_that_is_no_model_is_refused_with_advice(target, tmp_path):
    with pytest.raises(TypeError, match=r"got a str: load it with AutoModelForCausalLM.from_pretrained"):
        DraftTrainer(tiny_drafter("pard", target), target="a/path", args=DraftTrainingArguments(tmp_path, use_cpu=True))


def test_other_arguments_are_refused_with_advice(target, tmp_path):
    with pytest.raises(TypeError, match="takes DraftTrainingArguments, got TrainingArguments"):
        DraftTrainer(tiny_drafter("pard", target), args=TrainingArguments(tmp_path, use_cpu=True))


def test_the_target_is_frozen_and_evaluates_in_every_train_call(target, text, tmp_path):
    trainer = trainer_for("dflash", target, text, tmp_path, max_steps=1)
    for _ in range(2):
        target.train()
        target.requires_grad_(True)
        trainer.train()
        assert not any(module.training for module in target.modules())
        assert not any(parameter.requires_grad or parameter.grad is not None for parameter in target.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["dflash", "dflare", "dart"])
def test_what_is_borrowed_is_neither_trained_nor_saved(kind, tied, text, tmp_path):
    target = tiny_target("llama", tie_word_embeddings=tied)
    trainer = trainer_for(kind, target, text, tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    trained = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert trained == {id(weight) for weight in trainer.drafter.parameters()}
    assert not trained & {id(weight) for weight in target.parameters()}
    saved = torch.load(tmp_path / "checkpoint-1" / "optimizer.pt", weights_only=True)
    assert len(saved["state"]) == len(trained)
    names = set(type(trainer.drafter).from_pretrained(tmp_path / "checkpoint-1").state_dict())
    assert not any("embed" in name for name in names)
    assert ("lm_head.weight" in names) == (kind == "dart")


def test_two_processes_measure_the_tau_of_one(target, text, tmp_path):
    def evaluate(rank=0):
        trainer = trainer_for("dflash", target, text, tmp_path, tau_prompts=3, tau_new_tokens=12)
        scores = trainer.evaluate()
        return {name: scores[f"eval_{name}"] for name in ("tau", "expected_tau", "accuracy_1", "loss")}

    alone = evaluate()
    for scores in in_processes(evaluate):
        assert scores == pytest.approx(alone, abs=1e-3)
