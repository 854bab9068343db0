"""Every objective in a trainer, for every drafter: what it is worth by hand, however the batch is cut."""

import json

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser

from hf_pardraft import DraftTrainer, DraftTrainingArguments
from hf_pardraft.models.inputs import DraftInputs
from hf_pardraft.training import batch_scorer
from hf_pardraft.training.batch_scorer import prefix_in
from hf_pardraft.training.layouts import DroppedMasks
from hf_pardraft.training.losses.objectives import OBJECTIVES, parse_objective
from hf_pardraft.training.target.continuations import sample_continuations
from tiny_models import MASK_TOKEN_ID, random_prompt, tiny_drafter, tiny_target
from training.objective_values import objective_value

KINDS = ("pard", "dflash", "dflare", "dart", "pard2")
DEPTH = 4
ALL = "+".join(OBJECTIVES)


@pytest.fixture(scope="module")
def target():
    """With a head that the target's own logits need more than, and in float64, where sums are the same in every order."""
    return tiny_target("gemma3", final_logit_softcapping=5.0, eos_token_id=7, initializer_range=0.15).double()


def texts(count=8):
    """Texts of different lengths, of which different parts are learned."""
    rows = []
    for seed in range(count):
        ids = random_prompt(9 + 2 * (seed % 4), seed)[0].tolist()
        prompt = 2 + seed % 3
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return Dataset.from_list(rows)


def trainer_for(kind, target, folder, data=None, drafter=None, **settings):
    arguments = DraftTrainingArguments(
        folder,
        **{
            "max_steps": 1,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 8,
            "optim": "sgd",
            "learning_rate": 1.0,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "draft_tokens": DEPTH,
            "cod_retention": 1.0,
            "num_anchors": 100,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "loss_gamma": 3.0,
            "kl_gamma": 0.7,
            "loss_chunk_rows": 20,
            "tau_prompts": 0,
            **settings,
        },
    )
    drafter = drafter or tiny_drafter(kind, target, depth=DEPTH).double()
    data = data or texts()
    return DraftTrainer(drafter, target=target, args=arguments, train_dataset=data, eval_dataset=data)


def over_all_tokens(logits, token_ids):
    """A drafter's logits with -inf for the tokens that it never proposes."""
    if token_ids is None:
        return logits
    return torch.full((len(logits), 64), -torch.inf, dtype=logits.dtype).index_copy(1, token_ids, logits)


def drafted_by_hand(kind, drafter, target, rows):
    """Every prefix that a draft can begin after: what is drafted there, the text, the target's logits and confidence."""
    blocks = {name: [] for name in ("drafts", "labels", "valid", "target", "confidence", "prefix")}
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), row["labels"]
        # PARD drafts before the target has written anything; others need an anchor that it wrote.
        first = labels.count(-100) - (1 if kind.startswith("pard") else 0)
        teacher = target(ids).logits[0]
        probabilities = teacher[:-1].softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        for anchor in range(first, len(labels) - 1):
            prefix, positions = ids[:, : anchor + 1], torch.arange(anchor + 1)[None]
            hidden = target(prefix, output_hidden_states=True).hidden_states
            taps = drafter.taps_for(target)
            features = torch.cat([hidden[tap] for tap in taps], dim=-1)[:, :-1] if taps else None
            context = DraftInputs(prefix, positions, features, positions[:, :-1])
            drafted = drafter.draft(context, drafter.new_draft_state(target), DEPTH)[0]
            blocks["drafts"].append(over_all_tokens(drafted, drafter.draft_token_ids))
            ahead = ids[0, anchor + 1 : anchor + 1 + DEPTH]
            missing = DEPTH - len(ahead)
            pad = torch.nn.functional.pad
            blocks["labels"].append(pad(ahead, (0, missing)))
            blocks["valid"].append(torch.arange(DEPTH) < len(ahead))
            blocks["target"].append(pad(teacher[anchor : anchor + len(ahead)], (0, 0, 0, missing)))
            confidence = [1.0]
            for place in range(anchor, anchor + DEPTH - 1):
                confidence.append(confidence[-1] * (probabilities[place].item() if place < len(probabilities) else 0.0))
            blocks["confidence"].append(torch.tensor(confidence, dtype=torch.float64))
            blocks["prefix"].append(prefix[0])
    prefixes = blocks.pop("prefix")
    return {name: torch.stack(values) for name, values in blocks.items()}, prefixes


def by_hand(name, blocks, reduction="weight_sum", **other):
    settings = {"gamma": 3.0, "kl_gamma": 0.7, "dpace_alpha": 0.5, "reduction": reduction}
    b = {**blocks, **other}
    value = objective_value(name, b["drafts"], b["labels"], b["valid"], b["target"], b["confidence"], **settings)
    return OBJECTIVES[name].sign * value


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_each_objective_is_what_the_drafts_are_worth(kind, target, tmp_path, monkeypatch):
    data = texts(3)
    drafter = tiny_drafter(kind, target, depth=DEPTH).double()
    blocks, prefixes = drafted_by_hand(kind, drafter, target, data)
    continued = torch.full((len(prefixes), DEPTH), -1)

    def noted(target, chosen, uniforms):
        written = sample_continuations(target, chosen, uniforms)
        for prefix, tokens in zip(chosen, written, strict=True):
            (place,) = [i for i, known in enumerate(prefixes) if torch.equal(known, prefix)]
            continued[place] = tokens
        return written

    monkeypatch.setattr(batch_scorer, "sample_continuations", noted)
    for reduction in ("weight_sum", "paper"):
        for name in OBJECTIVES:
            trainer = trainer_for(kind, target, tmp_path, data, drafter, objective=name, loss_reduction=reduction)
            continued.fill_(-1)
            batch = trainer.data_collator(list(data))
            found = trainer.compute_loss(drafter.eval(), batch)
            if name == "streak":
                streaks = {"labels": continued, "valid": blocks["valid"] & (continued >= 0)}
            expected = by_hand(name, blocks, reduction, **(streaks if name == "streak" else {}))
            if name == "streak":
                # Of the prefixes that were continued.
                chosen = (continued >= 0).any(1)
                assert 20 < chosen.sum() <= 3 * trainer.args.streak_prefixes
            assert found.item() == pytest.approx(expected.item(), rel=1e-6), name
            assert abs(found.item()) > 1e-4


@torch.no_grad()
def test_a_sum_is_the_weighted_sum_of_its_terms(target, tmp_path):
    values = {}
    terms = {"cross_entropy": 1.0, "first_error": 0.3, "chain_reward": 40.0, "forward_kl": 2.0}
    for name, objective in {**{name: name for name in terms}, "all": terms}.items():
        trainer = trainer_for("dflash", target, tmp_path, objective=objective)
        values[name] = trainer.compute_loss(trainer.drafter.eval(), trainer.data_collator(list(texts()))).item()
    assert values["chain_reward"] < 0
    expected = sum(coefficient * values[name] for name, coefficient in terms.items())
    assert values["all"] == pytest.approx(expected, rel=1e-9)


def weights_after_one_step(kind, target, folder, **settings):
    trainer = trainer_for(kind, target, folder, **settings)
    before = {name: weight.detach().clone() for name, weight in trainer.drafter.named_parameters()}
    trainer.train()
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    steps = {name: before[name] - weight.detach() for name, weight in trainer.drafter.named_parameters()}
    return loss, steps


@pytest.mark.parametrize("reduction", ["weight_sum", "paper"])
@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        ("pard", "subtask_cross_entropy+0.5*forward_kl+first_error"),
        ("pard2", "0.1*cat_cross_entropy+cat_kl"),
        ("dflash", "cross_entropy+0.3*first_error+4*chain_reward"),
        ("dflare", "dpace+2*streak"),
        ("dart", "annealed_kl+cross_entropy"),
    ],
)
def test_accumulated_batches_of_different_sizes_train_like_one(kind, objective, reduction, target, tmp_path):
    settings = {"objective": objective, "loss_reduction": reduction, "cod_retention": 0.6}
    loss, step = weights_after_one_step(kind, target, tmp_path, **settings)
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    accumulated_loss, accumulated_step = weights_after_one_step(kind, target, tmp_path, **settings, **halves)
    assert accumulated_loss == pytest.approx(loss, rel=1e-6)
    assert max(part.abs().max() for part in step.values()) > 1e-3
    for name, part in step.items():
        torch.testing.assert_close(accumulated_step[name], part, rtol=1e-6, atol=1e-8)


def test_dropout_is_the_same_when_first_errors_are_looked_for(target, tmp_path):
    """With the random numbers of a run that accumulates without looking ahead."""
    ends = {}
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    for objective in ("cross_entropy", "cross_entropy+1e-30*first_error"):
        drafter = tiny_drafter("pard", target, depth=DEPTH).double()
        for layer in drafter.model.layers:
            layer.self_attn.attention_dropout = 0.5
        trainer = trainer_for("pard", target, tmp_path, None, drafter, objective=objective, **halves)
        trainer.train()
        ends[objective] = [weight.detach().clone() for weight in drafter.parameters()]
    for one, other in zip(*ends.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_evaluation_loss_is_that_of_all_examples_as_one_batch(target, tmp_path):
    losses = []
    for size in (8, 3):
        trainer = trainer_for(
            "dflash", target, tmp_path, objective="cross_entropy+first_error", per_device_eval_batch_size=size
        )
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_the_drafter_does_not_know_end_a_chain(kind, target, tmp_path):
    known = [*range(0, 64, 2), 3, 5, 7, 9, 11, 13]
    drafter = tiny_drafter(kind, target, depth=DEPTH).double()
    drafter.set_draft_vocabulary(known)
    data = texts(4)
    blocks, _ = drafted_by_hand(kind, drafter, target, data)
    is_known = torch.isin(blocks["labels"], torch.tensor(known)) & blocks["valid"]
    chained = is_known.long().cumprod(dim=1).bool()
    assert 5 < chained.sum() < is_known.sum() < blocks["valid"].sum()
    for name, valid in {"cross_entropy": is_known, "first_error": chained, "chain_reward": chained}.items():
        value = by_hand(name, blocks, valid=valid)
        trainer = trainer_for(kind, target, tmp_path, data, drafter, objective=name)
        found = trainer.compute_loss(drafter.eval(), trainer.data_collator(list(data)))
        assert found.item() == pytest.approx(value.item(), rel=1e-6), name
    # The law of what it knows, at all positions.
    column = torch.tensor(known)
    law, drafts = blocks["target"][..., column], blocks["drafts"][..., column]
    # Which token it was doesn't matter here.
    labels = torch.zeros_like(blocks["labels"])
    value = by_hand("forward_kl", {**blocks, "drafts": drafts, "target": law, "labels": labels})
    trainer = trainer_for(kind, target, tmp_path, data, drafter, objective="forward_kl")
    found = trainer.compute_loss(drafter.eval(), trainer.data_collator(list(data)))
    assert found.item() == pytest.approx(value.item(), rel=1e-6)
    trainer = trainer_for(kind, target, tmp_path, data, drafter, objective=ALL)
    assert torch.isfinite(trainer.compute_loss(drafter, trainer.data_collator(list(data))))


def test_continuations_are_the_targets_own_samples(target):
    """Their frequencies are its law, and a prefix's draw doesn't depend on the others."""
    prefix = random_prompt(5, 3)[0]
    uniforms = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0))
    written = sample_continuations(target, [prefix] * 4000, uniforms)
    law = target(prefix[None]).logits[0, -1].softmax(-1)
    frequencies = torch.bincount(written[:, 0], minlength=64) / 4000
    assert (frequencies - law).abs().max() < 0.03
    favourite = int(law.argmax())
    second_law = target(torch.cat([prefix, torch.tensor([favourite])])[None]).logits[0, -1].softmax(-1)
    seconds = written[written[:, 0] == favourite, 1]
    assert (torch.bincount(seconds, minlength=64) / len(seconds) - second_law).abs().max() < 0.06
    # After its end of text there is nothing.
    assert ((written[:, 1] == -1) == (written[:, 0] == 7)).all()
    assert (written[:, 0] == 7).any()
    longer = random_prompt(8, 4)[0]
    mixed = sample_continuations(target, [longer, prefix], torch.stack([uniforms[5], uniforms[1]]))
    assert mixed[1].tolist() == written[1].tolist()


@torch.no_grad()
def test_continuations_end_where_the_context_of_the_target_does(tmp_path):
    """Learned positions have no row for what comes after."""
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    torch.manual_seed(0)
    target = GPT2LMHeadModel(GPT2Config(n_positions=16, eos_token_id=None, bos_token_id=None, **sizes)).eval()
    prefixes = [random_prompt(length, length)[0] for length in (16, 4, 15, 13, 12)]
    uniforms = torch.rand(5, DEPTH, generator=torch.Generator().manual_seed(0))
    written = sample_continuations(target, prefixes, uniforms)
    assert (written >= 0).sum(dim=1).tolist() == [0, 4, 1, 3, 4]
    for prefix, numbers, tokens in zip(prefixes, uniforms, written, strict=True):
        text = prefix
        for number, token in zip(numbers, tokens[tokens >= 0], strict=False):
            law = target(text[None]).logits[0, -1].double().softmax(-1).cumsum(-1)
            assert token == (law <= number * law[-1]).sum()
            text = torch.cat([text, token[None]])
    data = Dataset.from_list([{"input_ids": random_prompt(16, seed)[0].tolist()} for seed in range(4)])
    trainer = trainer_for("dflash", target, tmp_path, data, tiny_drafter("dflash", target, DEPTH), objective="streak")
    trainer.compute_loss(trainer.drafter, trainer.data_collator(list(trainer.train_dataset)))


@pytest.mark.parametrize(
    "setting",
    [
        {"num_return_sequences": 2},
        {"stop_strings": ["no tokenizer"]},
        {"suppress_tokens": [*range(60)]},
        {"num_beams": 2},
    ],
)
def test_continuations_follow_the_targets_law_whatever_its_own_settings_ask_for(setting):
    target = tiny_target("qwen3", eos_token_id=7)
    prefixes, uniforms = [random_prompt(5, 3)[0]] * 20, torch.rand(20, 3, generator=torch.Generator().manual_seed(0))
    plain = sample_continuations(target, prefixes, uniforms)
    vars(target.generation_config).update(setting)
    assert torch.equal(sample_continuations(target, prefixes, uniforms), plain)


def test_continuations_follow_seed_epoch_and_example(target, tmp_path):
    trainer = trainer_for("dflash", target, tmp_path, objective="streak", streak_prefixes=2)
    batch = trainer.data_collator(list(texts(3)))
    drafter = trainer.drafter.eval()
    first = trainer.compute_loss(drafter, batch).item()
    torch.manual_seed(99)
    assert trainer.compute_loss(drafter, batch).item() == first
    trainer.scorer.epoch = 1
    assert trainer.compute_loss(drafter, batch).item() != first


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_target_writes_for_each_batch_once_however_often_it_is_scored(
    kind, accumulation, target, tmp_path, monkeypatch
):
    samples, scored = [], []

    def noted(*arguments):
        samples.append(sample_continuations(*arguments))
        return samples[-1]

    monkeypatch.setattr(batch_scorer, "sample_continuations", noted)
    settings = {"objective": "cross_entropy+streak", "streak_prefixes": 2, "per_device_train_batch_size": 2}
    settings |= {"gradient_accumulation_steps": accumulation, "max_steps": 2, "save_strategy": "no"}
    trainer = trainer_for(kind, target, tmp_path, texts(6), **settings)
    continuations = trainer.scorer.continuations
    trainer.scorer.continuations = lambda *arguments: scored.append(continuations(*arguments)) or scored[-1]
    trainer.train()
    assert len(samples) == 2 * accumulation
    if accumulation == 1:
        assert len(scored) == 2
        return
    # Of each step: asked for each batch, scored for its denominators, and, when all are known, scored for the loss.
    for step in range(2):
        part = scored[step * 9 : step * 9 + 9]
        beforehand, again = part[:6], part[6:]
        for batch in range(3):
            assert beforehand[2 * batch] is beforehand[2 * batch + 1]
            assert torch.equal(again[batch], beforehand[2 * batch])
    assert any((found >= 0).any() for found in scored)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("cross_entropy", {"cross_entropy": 1.0}),
        (
            " cross_entropy + 0.3*first_error+40 * chain_reward ",
            {"cross_entropy": 1, "first_error": 0.3, "chain_reward": 40},
        ),
        ("1e+1*dpace+streak*2", {"dpace": 10.0, "streak": 2.0}),
        ({"annealed_kl": 1, "cross_entropy": "0.5"}, {"annealed_kl": 1.0, "cross_entropy": 0.5}),
    ],
)
def test_an_objective_is_written_as_a_sum_or_a_mapping(written, meant):
    assert parse_objective(written) == meant


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ("crossentropy", "the known ones are cross_entropy, subtask_cross_entropy, first_error"),
        ("cross_entropy-40*chain_reward", "Rewards are subtracted"),
        ("cross_entropy+-40*chain_reward", "It is a reward, and subtracted as it is"),
        ("cross_entropy+cross_entropy", "twice"),
        ("0*cross_entropy", "must be a positive number"),
        ("nan*cross_entropy", "is a sum of names"),
        ({"cross_entropy": float("nan")}, "must be a positive number"),
        ({"cross_entropy": True}, "must be a positive number"),
        ({"cross_entropy": None}, "must be a positive number"),
        ("cross_entropy+", "is a sum of names"),
        ("2*3*cross_entropy", "is a sum of names"),
        ({}, "at least one of"),
        ("", "is a sum of names"),
    ],
)
def test_an_objective_that_is_none_is_refused(written, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        DraftTrainingArguments(tmp_path, use_cpu=True, objective={} if written == {} else written)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("loss_reduction", "mean"),
        ("loss_chunk_rows", 0),
        ("kl_temperature", 0.0),
        ("dpace_alpha", 1.0),
        ("streak_prefixes", 0),
    ],
)
def test_loss_settings_out_of_range_are_refused(setting, value, tmp_path):
    with pytest.raises(ValueError, match=setting.removeprefix("loss_") if value == "mean" else setting):
        DraftTrainingArguments(tmp_path, use_cpu=True, **{setting: value})


def test_an_objective_comes_from_the_command_line_and_from_a_file(tmp_path):
    parser = HfArgumentParser(DraftTrainingArguments)
    line = ["--output_dir", str(tmp_path), "--use_cpu", "--objective", "cross_entropy+40*chain_reward"]
    (arguments,) = parser.parse_args_into_dataclasses(line)
    assert parse_objective(arguments.objective) == {"cross_entropy": 1.0, "chain_reward": 40.0}
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nobjective:\n  cross_entropy: 1\n  first_error: 0.3\n")
    (arguments,) = parser.parse_yaml_file(settings)
    assert parse_objective(arguments.objective) == {"cross_entropy": 1.0, "first_error": 0.3}
    assert json.loads(arguments.to_json_string())["objective"] == {"cross_entropy": 1, "first_error": 0.3}
    assert "first_error" in parser.format_help()


def test_by_default_each_drafter_learns_as_in_its_paper(target, tmp_path):
    expected = {
        "pard": "subtask_cross_entropy",
        "pard2": "subtask_cross_entropy",
        "dflash": "cross_entropy",
        "dflare": "cross_entropy",
        "dart": "annealed_kl",
    }
    for kind, name in expected.items():
        assert trainer_for(kind, target, tmp_path).scorer.coefficients == {name: 1.0}


@pytest.mark.parametrize("name", [name for name, objective in OBJECTIVES.items() if objective.asks_target])
def test_what_asks_the_target_needs_one(name, tmp_path, target):
    with pytest.raises(ValueError, match=f"{name} learns from what the target says.*pass target="):
        trainer_for("pard", None, tmp_path, drafter=tiny_drafter("pard", target), objective=name)


def test_a_collator_that_drafts_further_than_the_arguments_say_is_refused(target, tmp_path):
    trainer = trainer_for("pard", target, tmp_path, draft_tokens=3)
    trainer.data_collator = DroppedMasks(MASK_TOKEN_ID, num_tokens=6, retention=1.0)
    with pytest.raises(ValueError, match="drafts 6 tokens ahead, and training was set up for 3"):
        trainer.compute_loss(trainer.drafter, trainer.data_collator(list(texts())))


def test_a_packed_prefix_begins_with_its_document():
    ids = list(range(10, 19))
    packed = {"input_ids": ids, "labels": ids, "document_ids": [0] * 4 + [1] * 5}
    batch = DroppedMasks(MASK_TOKEN_ID, num_tokens=3, retention=1.0)([packed])
    (text,), (documents,) = DroppedMasks.text(batch)
    assert prefix_in(text, documents, 6).tolist() == [14, 15, 16]
    assert prefix_in(text, documents, 2).tolist() == [10, 11, 12]
    assert prefix_in(text, documents * 0, 6).tolist() == ids[:7]


def test_the_terms_of_a_sum_are_logged_by_name(target, tmp_path):
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    trainer = trainer_for(
        "dflash", target, tmp_path, objective="cross_entropy+0.3*first_error+4*chain_reward", **halves
    )
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    scores = trainer.evaluate()
    for found, prefix in ((logged, ""), (scores, "eval_")):
        terms = [found[prefix + name] for name in ("cross_entropy", "first_error", "chain_reward")]
        assert found[prefix + "loss"] == pytest.approx(terms[0] + 0.3 * terms[1] - 4 * terms[2], rel=1e-5)
        assert 0 < terms[2] < 1
    alone = trainer_for("dflash", target, tmp_path, objective="cross_entropy")
    assert "eval_cross_entropy" not in alone.evaluate()
