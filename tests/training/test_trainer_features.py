"""What users of transformers' `Trainer` are used to works with DraftTrainer too, or is refused before any work."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers.trainer
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from hf_pardraft import AutoDrafter, DraftTrainer, DraftTrainingArguments
from tiny_models import tiny_drafter, tiny_target
from tiny_tokenizers import SAMPLE_TEXT, tiny_tokenizer
from training.tiny_training import losses, trainer_for

RAW = [{"text": SAMPLE_TEXT[start:]} for start in (0, 4, 9, 14)]


@pytest.fixture(scope="module")
def reader():
    """A target of the tokenizer's vocabulary."""
    return tiny_target("qwen3", vocab_size=300)


def trainer_on_text(kind, target, folder, **settings):
    options = {"processing_class": tiny_tokenizer(), **settings.pop("trainer_options", {})}
    settings = {"max_steps": 1, "max_length": 24, "cod_retention": 1.0, **settings}
    return trainer_for(kind, target, RAW, folder, trainer_options=options, **settings)


def test_data_sets_that_are_given_later_may_be_raw(reader, tmp_path):
    trainer = trainer_on_text("dflash", reader, tmp_path, tau_prompts=1, tau_new_tokens=4)
    own = trainer.evaluate()
    given = trainer.evaluate(RAW)
    assert given["eval_loss"] == pytest.approx(own["eval_loss"])
    several = trainer.evaluate({"first": RAW[:2], "all": RAW})
    assert several["eval_all_loss"] == pytest.approx(own["eval_loss"])
    assert several["eval_first_tau"] >= 1
    predicted = trainer.predict(RAW).metrics
    assert predicted["test_loss"] == pytest.approx(own["eval_loss"])
    assert predicted["test_tau"] == own["eval_tau"]


def test_torch_data_sets_may_be_raw_unless_the_caller_collates(reader, tmp_path):
    """As `random_split` gives them: rows that no collator could read ended a run at its first batch, or its first evaluation."""
    split = torch.utils.data.Subset(RAW, [2, 0])
    trainer = trainer_on_text("dflash", reader, tmp_path, trainer_options={"eval_dataset": split})
    assert trainer.evaluate(split)["eval_loss"] == trainer.evaluate([RAW[2], RAW[0]])["eval_loss"]
    again = DraftTrainer(
        trainer.drafter, reader, trainer.args, train_dataset=split, processing_class=trainer.processing_class
    )
    assert again.train_dataset[:] == trainer.eval_dataset[:]
    tokens = torch.utils.data.Subset([*trainer.eval_dataset], [1, 0])
    own = {"train_dataset": split, "eval_dataset": tokens}
    collating = DraftTrainer(trainer.drafter, reader, trainer.args, data_collator=trainer.data_collator, **own)
    assert (collating.train_dataset, collating.eval_dataset) == (split, tokens)


def test_each_of_several_evaluation_sets_can_choose_the_best_checkpoint(target, text, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    sets = {"near": text.select([0, 1]), "far": text.select([2, 3])}
    settings |= {"load_best_model_at_end": True, "tau_prompts": 1, "tau_new_tokens": 4}

    def trainer(metric):
        options = {"trainer_options": {"eval_dataset": sets}, "metric_for_best_model": metric, **settings}
        return trainer_for("dflash", target, text, tmp_path, **options)

    taus = iter([1.0, 3.0, 2.0, 1.5])
    chosen = trainer("eval_far_tau")
    chosen.measured_drafting = lambda examples: {"tau": next(taus)}
    chosen.train()
    assert chosen.state.best_model_checkpoint.endswith("checkpoint-1")
    with pytest.raises(ValueError, match=r"eval_far_tau.* needs prompts to decode"):
        trainer_for("dflash", target, text, tmp_path, metric_for_best_model="eval_far_tau")


def test_a_stream_is_trained_on_and_evaluated(target, text, tmp_path):
    streams = {"train": text.to_iterable_dataset(), "eval": text.to_iterable_dataset()}
    trainer = trainer_for("dflash", target, streams["train"], tmp_path, max_steps=3, tau_prompts=2, tau_new_tokens=4)
    trainer.train()
    assert len(losses(trainer)) == 3
    # Two batches make a pass.
    assert trainer.scorer.epoch == trainer.data_collator.epoch == 1
    assert trainer.evaluate(streams["eval"])["eval_tau"] >= 1


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stream_goes_on_in_the_pass_of_its_checkpoint(accumulation, target, text, tmp_path):
    """Eight rows in batches of two: four batches make a pass, and of each the anchors are other ones."""
    settings = {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    unbroken, *resumed = goes_on(text.to_iterable_dataset(), target, tmp_path, (1, 2, 3, 5), num_anchors=1, **settings)
    assert [trainer.scorer.epoch for trainer in (unbroken, *resumed)] == 5 * [(6 * accumulation - 1) // 4]


def goes_on(data, target, folder, steps, **settings):
    """Trainers: of an unbroken run, and of runs that go on from its checkpoints of these steps with the same losses."""
    saving = {"save_strategy": "steps", "save_steps": 1}
    unbroken = trainer_for("dflash", target, data, folder / "unbroken", **saving, **settings)
    unbroken.train()
    yield unbroken
    for step in steps:
        resumed = trainer_for("dflash", target, data, folder / "resumed", **settings)
        resumed.train(resume_from_checkpoint=str(folder / "unbroken" / f"checkpoint-{step}"))
        assert losses(resumed) == losses(unbroken), step
        yield resumed


def test_examples_grouped_by_length_come_in_the_order_of_an_unbroken_run(target, text, tmp_path):
    lengths = text.map(lambda row, place: {name: row[name][: 12 + 2 * place] for name in row}, with_indices=True)
    settings = {"max_steps": 9, "per_device_train_batch_size": 2, "train_sampling_strategy": "group_by_length"}
    unbroken, *_ = goes_on(lengths, target, tmp_path, (1, 4, 5, 7), **settings)
    # Four steps make an epoch, and each has an order of its own.
    orders = []
    for epoch in range(3):
        sampler = unbroken._get_train_sampler()
        sampler.epoch = epoch
        orders.append([*sampler])
    assert len({*map(tuple, orders)}) == 3


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_draw_the_patterns_of_each_epoch(persistent, target, text, tmp_path):
    settings = {"cod_retention": 0.5, "max_steps": 6}
    alone = trainer_for("pard", target, text, tmp_path, **settings)
    alone.train()
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": persistent}
    helped = trainer_for("pard", target, text, tmp_path, **workers, **settings)
    helped.train()
    assert losses(helped) == losses(alone)


def test_what_would_be_left_undone_is_refused(target, text, tmp_path):
    for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
        with pytest.raises(ValueError, match=f"no use for {name}"):
            trainer_for("dflash", target, text, tmp_path, trainer_options={name: lambda *arguments: {}})
    with pytest.raises(ValueError, match=r"got model_init.* a drafter and a trainer for each trial"):
        DraftTrainer(None, target, model_init=lambda: tiny_drafter("dflash", target), train_dataset=text)
    with pytest.raises(ValueError, match="no use for label_smoothing_factor"):
        trainer_for("dflash", target, text, tmp_path, label_smoothing_factor=0.1)
    arguments = DraftTrainingArguments(tmp_path, metric_for_best_model="tau", use_cpu=True, report_to=[])
    sets = {"near": text, "far": text}
    with pytest.raises(ValueError, match="choose one of eval_near_tau, eval_far_tau"):
        DraftTrainer(tiny_drafter("dflash", target), target, arguments, train_dataset=text, eval_dataset=sets)


def test_an_optimizer_of_weights_that_are_not_trained_is_refused(target, text, tmp_path):
    """Of an adapter, or of a head that a draft vocabulary cut, it would learn nothing."""
    peft = pytest.importorskip("peft")
    adapter = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj"])}
    for kind, options, settings in (
        ("dart", {}, {"draft_vocab_size": 20}),
        ("dflash", adapter, {}),
        ("pard", adapter, {}),
    ):
        drafter = tiny_drafter(kind, target)
        options = {"optimizers": (torch.optim.SGD(drafter.parameters(), lr=0.1), None), **options}
        with pytest.raises(ValueError, match="optimizer_cls_and_kwargs"):
            trainer_for(kind, target, text, tmp_path, drafter=drafter, trainer_options=options, **settings)


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
def test_an_optimizer_of_what_is_trained_is_used(kind, target, text, tmp_path):
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(range(20))
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.1)
    options, before = {"optimizers": (optimizer, None)}, [weight.detach().clone() for weight in drafter.parameters()]
    trainer_for(kind, target, text, tmp_path, drafter=drafter, trainer_options=options, max_steps=1).train()
    assert all(not torch.equal(*pair) for pair in zip(drafter.parameters(), before, strict=True))


def test_a_target_that_is_spread_over_devices_is_refused(text, tmp_path):
    spread = tiny_target("qwen3")
    spread.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1}
    with pytest.raises(ValueError, match="spread over 0, 1, and a process trains on one device"):
        trainer_for("dflash", spread, text, tmp_path)
    spread.hf_device_map = {"": "cpu"}
    trainer_for("dflash", spread, text, tmp_path)


class HubUploads:
    """What a Trainer sends to the Hub: the files of each upload, and what a user would load at that time."""

    def __init__(self):
        self.files, self.loaded = [], []

    def create_repo(self, name, **options):
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, repo_id, folder_path, run_as_future, **options):
        folder = Path(folder_path)
        self.files.append({path.name for path in folder.iterdir() if not path.name.startswith("checkpoint-")})
        self.loaded.append(AutoDrafter.from_pretrained(folder).state_dict())
        done = Future()
        done.set_result(repo_id)
        return done if run_as_future else repo_id


@pytest.fixture
def uploads(monkeypatch):
    found = HubUploads()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: found)
    return found


def test_every_push_is_a_drafter_with_a_card_of_its_own(reader, tmp_path, uploads):
    published = {"push_to_hub": True, "hub_model_id": "someone/drafter", "hub_always_push": True}
    settings = {**published, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = trainer_on_text("pard2", reader, tmp_path, **settings)
    trainer.train()
    trainer.save_model()
    assert len(uploads.files) == 3
    for names, weights in zip(uploads.files[:2], uploads.loaded, strict=False):
        assert {"target_projection", "modeling_pard.py", "custom_generate", "tokenizer.json"} <= names
        assert "unfinished-checkpoint" not in names
        assert "target_proj.weight" in weights
    assert "README.md" in uploads.files[2]
    trainer.push_to_hub(tags=["tiny"], dataset_tags="someone/texts", language="en", finetuned_from="someone/target")
    card = ModelCard.load(tmp_path / "README.md")
    assert 'from_pretrained("someone/drafter"' in card.text
    assert {"speculative-decoding", "tiny"} <= set(card.data.tags)
    assert (card.data.datasets, card.data.language) == (["someone/texts"], "en")
    assert card.data.base_model == "someone/target"
    # A Trainer's own card would say how a language model was fine-tuned.
    assert "fine-tuned version" not in card.text


@pytest.mark.parametrize("published", [False, True])
def test_a_merged_adapter_comes_with_its_tokenizer_and_is_pushed_as_a_drafter(published, reader, tmp_path, uploads):
    peft = pytest.importorskip("peft")
    settings = {"push_to_hub": True, "hub_model_id": "someone/drafter"} if published else {}
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    trainer = trainer_on_text(
        "pard",
        reader,
        tmp_path,
        save_strategy="steps",
        save_steps=1,
        trainer_options={"peft_config": config},
        **settings,
    )
    trainer.train()
    trainer.save_model()
    assert len(uploads.files) == published
    assert not (tmp_path / "adapter_config.json").exists()
    assert (tmp_path / "checkpoint-1" / "adapter_config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path)("def add").input_ids == tiny_tokenizer()("def add").input_ids
    merged = AutoDrafter.from_pretrained(tmp_path).state_dict()
    assert not any("lora" in name for name in merged)
    assert all(torch.isfinite(weight).all() for weight in merged.values())
