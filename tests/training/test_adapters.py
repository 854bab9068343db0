"""Adapters of PARD drafters are trained with their mask token, resumed, and saved merged or as they are."""

import json
from pathlib import Path

import pytest
import torch

from hf_pardraft import AutoDrafter, PardDrafter
from processes import in_processes
from tiny_models import tiny_drafter, tiny_target
from training.tiny_training import losses, trainer_for

peft = pytest.importorskip("peft")
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
METHODS = {
    "lora": lambda: peft.LoraConfig(**LORA, task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"]),
}


def saved_drafter(kind, target, folder: Path, **overrides):
    """A drafter that knows where it was loaded from."""
    drafter = tiny_drafter(kind, target, **overrides)
    drafter.save_pretrained(folder)
    return AutoDrafter.from_pretrained(folder)


def adapter_trainer(kind, target, text, folder, method="lora", drafter=None, **settings):
    return trainer_for(
        kind, target, text, folder, drafter=drafter, trainer_options={"peft_config": METHODS[method]()}, **settings
    )


def drafts(drafter, target) -> torch.Tensor:
    """`(1, depth, vocab)`, what it makes of a text."""
    logits, draft = [], drafter.draft
    drafter.draft = lambda *arguments: logits.append(draft(*arguments)) or logits[-1]
    ids = torch.arange(3, 11)[None]
    target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=drafter.eval(), max_new_tokens=1, do_sample=False
    )
    target.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=drafter.eval(), max_new_tokens=6, do_sample=False
    )
    del drafter.draft
    return logits[-1].detach()


def test_a_drafter_that_an_adapter_was_merged_into_can_be_trained_on_as_a_whole(target, text, tmp_path):
    drafter = saved_drafter("pard", target, tmp_path / "base")
    trainer = adapter_trainer("pard", target, text, tmp_path / "run", drafter=drafter, keep_adapter=True, max_steps=1)
    trainer.save_model(tmp_path / "adapter")
    loaded = AutoDrafter.from_pretrained(tmp_path / "adapter")
    whole = AutoDrafter.from_pretrained(tmp_path / "base")
    learned, expected = (
        {name: weight.requires_grad for name, weight in model.named_parameters()} for model in (loaded, whole)
    )
    assert learned == expected
    before = {name: weight.detach().clone() for name, weight in loaded.named_parameters()}
    trainer_for("pard", target, text, tmp_path / "on", drafter=loaded, max_steps=1).train()
    assert all(not torch.equal(weight, before[name]) for name, weight in loaded.named_parameters() if "q_proj" in name)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("kind", "method"), [("pard", "lora"), ("pard", "dora"), ("pard", "ia3"), ("pard", "loha"), ("pard2", "lora")]
)
def test_what_was_trained_is_what_autodrafter_loads(kind, method, keep, target, text, tmp_path):
    drafter = saved_drafter(kind, target, tmp_path / "base")
    trainer = adapter_trainer(kind, target, text, tmp_path / "run", method, drafter, keep_adapter=keep, max_steps=8)
    before = drafts(trainer.drafter, target)
    trainer.train()
    trained = drafts(trainer.drafter, target)
    assert not torch.allclose(trained, before, atol=1e-2)
    trainer.save_model(tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").exists() == keep
    assert (tmp_path / "out" / "model.safetensors").exists() != keep
    loaded = AutoDrafter.from_pretrained(tmp_path / "out")
    assert type(loaded) is type(tiny_drafter(kind, target))
    torch.testing.assert_close(drafts(loaded, target), trained, rtol=1e-4, atol=1e-4)
    assert loaded.draft_depth == 4
    assert loaded.config.target_model_type == "qwen3"
    # Saving the merged one left the adapter where it was, to be trained further.
    torch.testing.assert_close(drafts(trainer.drafter, target), trained)


@pytest.mark.parametrize("tied", [False, True])
def test_the_mask_tokens_embedding_is_learned_and_no_others(tied, target, text, tmp_path):
    base = tiny_target("qwen3", seed=1, num_hidden_layers=2, tie_word_embeddings=tied)
    drafter = PardDrafter.from_causal_lm(base, mask_token_id=63)
    before = drafter.get_input_embeddings().weight.detach().clone()
    trainer = adapter_trainer("pard", target, text, tmp_path, drafter=drafter, max_steps=4)
    trainable = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    assert trainable < 0.3 * sum(weight.numel() for weight in trainer.model.parameters())
    trainer.train()
    trainer.save_model(tmp_path / "out")
    after = AutoDrafter.from_pretrained(tmp_path / "out").get_input_embeddings().weight
    assert torch.equal(after[:63], before[:63])
    assert not torch.allclose(after[63], before[63], atol=1e-3)


def test_what_the_config_says_of_the_embedding_is_done(target, text, tmp_path):
    config = peft.LoraConfig(**LORA, modules_to_save=["embed_tokens"])
    trainer = trainer_for("pard", target, text, tmp_path, max_steps=1, trainer_options={"peft_config": config})
    assert config.trainable_token_indices is None
    assert trainer.model.get_input_embeddings().weight.requires_grad


@pytest.mark.parametrize("kind", ["pard", "pard2"])
def test_a_resumed_adapter_has_the_losses_of_an_unbroken_one(kind, target, text, tmp_path):
    unbroken = adapter_trainer(kind, target, text, tmp_path / "unbroken")
    unbroken.train()
    first = adapter_trainer(kind, target, text, tmp_path / "cut", max_steps=3, save_strategy="steps", save_steps=3)
    first.train()
    second = adapter_trainer(kind, target, text, tmp_path / "cut")
    second.train(resume_from_checkpoint=True)
    assert losses(second) == pytest.approx(losses(unbroken), abs=1e-6)
    # What was frozen is not in the checkpoint.
    assert not (tmp_path / "cut" / "checkpoint-3" / "model.safetensors").exists()


def test_the_best_adapter_by_tau_is_brought_back(target, text, tmp_path):
    settings = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2, "tau_prompts": 2}
    trainer = adapter_trainer(
        "pard",
        target,
        text,
        tmp_path,
        load_best_model_at_end=True,
        metric_for_best_model="tau",
        tau_new_tokens=8,
        **settings,
    )
    taus = iter([3.0, 2.0, 1.0])
    trainer.measured_drafting = lambda examples: {"tau": next(taus)}
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    weights = {name: w for name, w in trainer.model.state_dict().items() if "lora_B" in name}
    again = adapter_trainer("pard", target, text, tmp_path / "again", max_steps=2)
    again.train()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, again.model.state_dict()[name])


def test_a_kept_adapter_knows_what_it_was_trained_with(target, text, tmp_path):
    drafter = saved_drafter("pard", target, tmp_path / "base")
    trainer = adapter_trainer("pard", target, text, tmp_path / "run", drafter=drafter, keep_adapter=True, max_steps=1)
    chats = {"template_hash": "x", "template_kwargs": {}, "prompt_end": "", "prompt_end_ids": []}
    known = {"chat_format": chats, "tokenizer_hash": "y", "target_revision": None}
    for name, value in known.items():
        setattr(trainer.drafter.config, name, value)
    trainer.train()
    trainer.save_model()
    base = AutoDrafter.from_pretrained(tmp_path / "base")
    # The base may have been trained with something else.
    base.config.target_revision, base.config.chat_format = "z", {**chats, "template_hash": "other"}
    base.save_pretrained(tmp_path / "base")
    loaded = AutoDrafter.from_pretrained(tmp_path / "run").config
    assert {name: getattr(loaded, name) for name in known} == known


def test_an_adapter_of_a_plain_causal_lm_finds_its_mask_token(target, text, tmp_path):
    tiny_target("qwen3", seed=1, num_hidden_layers=2).save_pretrained(tmp_path / "plain")
    drafter = PardDrafter.from_causal_lm(str(tmp_path / "plain"), mask_token_id=62)
    trainer = adapter_trainer("pard", target, text, tmp_path / "out", drafter=drafter, keep_adapter=True)
    trainer.train()
    trainer.save_model()
    loaded = AutoDrafter.from_pretrained(tmp_path / "out")
    assert loaded.config.pard_token == 62
    torch.testing.assert_close(drafts(loaded, target), drafts(trainer.drafter, target), rtol=1e-4, atol=1e-4)
    # And with PEFT alone.
    through_peft = peft.PeftModel.from_pretrained(
        PardDrafter.from_causal_lm(str(tmp_path / "plain"), mask_token_id=62), str(tmp_path / "out")
    )
    torch.testing.assert_close(
        drafts(through_peft.get_base_model(), target), drafts(loaded, target), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", ["dflash", "dart"])
def test_other_drafters_take_adapters_too(kind, target, text, tmp_path):
    drafter = saved_drafter(kind, target, tmp_path / "base")
    trainer = adapter_trainer(kind, target, text, tmp_path / "run", drafter=drafter, keep_adapter=True)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    trainer.save_model(tmp_path / "out")
    loaded = AutoDrafter.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(drafts(loaded, target), drafts(trainer.drafter, target), rtol=1e-4, atol=1e-4)


def test_a_wrapped_model_is_taken_as_it_is(target, text, tmp_path):
    wrapped = peft.get_peft_model(tiny_drafter("pard", target), METHODS["lora"]())
    trainer = trainer_for("pard", target, text, tmp_path, drafter=wrapped, max_steps=2)
    trainer.train()
    trainer.save_model(tmp_path / "out")
    assert isinstance(AutoDrafter.from_pretrained(tmp_path / "out"), PardDrafter)


def test_what_can_not_be_is_refused_before_training(target, text, tmp_path):
    for unnamed in (peft.LoraConfig(r=4), peft.LoHaConfig(r=4)):
        with pytest.raises(ValueError, match=r"a dflash drafter needs the names.*target_modules of peft_config"):
            trainer_for("dflash", target, text, tmp_path, trainer_options={"peft_config": unnamed})
    with pytest.raises(TypeError, match="another of PEFT's, got a str"):
        trainer_for("pard", target, text, tmp_path, trainer_options={"peft_config": "lora"})
    prompts = {"peft_config": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)}
    with pytest.raises(ValueError, match="tokens of its own before a text"):
        trainer_for("pard", target, text, tmp_path, trainer_options=prompts)
    with pytest.raises(ValueError, match="not loaded from anywhere"):
        adapter_trainer("pard", target, text, tmp_path, keep_adapter=True)
    nameless = tmp_path / "nameless"
    drafter = saved_drafter("pard", target, tmp_path / "base")
    trainer = adapter_trainer("pard", target, text, nameless, drafter=drafter, keep_adapter=True)
    trainer.save_model()
    config = json.loads((nameless / "adapter_config.json").read_text())
    (nameless / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="does not say what it belongs to"):
        AutoDrafter.from_pretrained(nameless)


def test_two_processes_train_the_adapter_of_one(target, text, tmp_path):
    settings = {"cod_retention": 1.0, "max_steps": 3}
    alone = adapter_trainer("pard", target, text, tmp_path / "alone", **settings)
    alone.train()

    def train(rank):
        trainer = adapter_trainer("pard", target, text, tmp_path / "both", per_device_train_batch_size=2, **settings)
        trainer.train()
        trainer.save_model()
        return losses(trainer)

    for found in in_processes(train):
        assert found == pytest.approx(losses(alone), abs=1e-5)
    AutoDrafter.from_pretrained(tmp_path / "both")


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_adapter_of_a_head_that_was_cut_down_is_as_large_as_that(target, text, tmp_path):
    """A DART drafter's, which trains its own."""
    drafter = saved_drafter("dart", target, tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    options = {"drafter": drafter, "keep_adapter": True, "draft_vocab_size": 20, "max_steps": 3}
    trainer = trainer_for("dart", target, text, tmp_path / "run", trainer_options={"peft_config": config}, **options)
    trainer.train()
    trainer.save_model(tmp_path / "out")
    loaded = AutoDrafter.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.draft_token_ids, trainer.drafter.draft_token_ids)
    torch.testing.assert_close(drafts(loaded, target), drafts(trainer.drafter, target), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("modules", [["q_proj"], ["q_proj", "lm_head"]])
def test_a_drafter_with_rows_of_its_targets_head_keeps_them_with_an_adapter(modules, target, text, tmp_path):
    drafter = tiny_drafter("dflash", target)
    drafter.set_draft_vocabulary([3, 5, 8, 9, 20], target)
    drafter.save_pretrained(tmp_path / "base")
    drafter = AutoDrafter.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=modules)
    options = {"drafter": drafter, "keep_adapter": True, "max_steps": 2}
    trainer = trainer_for("dflash", target, text, tmp_path / "run", trainer_options={"peft_config": config}, **options)
    trainer.train()
    trainer.save_model(tmp_path / "out")
    loaded = AutoDrafter.from_pretrained(tmp_path / "out")
    assert loaded.config.own_head
    assert loaded.lm_head.weight.shape[0] == 5
    torch.testing.assert_close(drafts(loaded, target), drafts(trainer.drafter, target), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "adapted", [{"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}]
)
@pytest.mark.parametrize("kind", ["dart", "dflash"])
def test_an_adapted_head_is_not_lost_to_a_draft_vocabulary(kind, adapted, target, text, tmp_path):
    drafter = tiny_drafter(kind, target)
    drafter.set_draft_vocabulary(range(30), **({"target": target} if kind == "dflash" else {}))
    wrapped = peft.get_peft_model(drafter, peft.LoraConfig(r=2, **adapted))
    head = drafter.lm_head
    with pytest.raises(ValueError, match=r"lm_head of this \w+ is no plain linear layer but a .* choose it before"):
        trainer_for(kind, target, text, tmp_path, drafter=wrapped, draft_vocab_size=20)
    assert drafter.lm_head is head
    assert drafter.config.draft_vocab_size == 30
    wrapped.merge_and_unload().set_draft_vocabulary(range(20))
