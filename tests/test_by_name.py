"""Where transformers is given a drafter's name, it is the drafter that is loaded, and used."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    pipeline,
)
from transformers.pipelines import base as pipelines

from hf_pardraft import AutoDrafter, DFlashDrafter, PardDrafter, by_name
from hf_pardraft.demo.family import DRAFTER_NAMES, SHIPPED_FAMILY
from hf_pardraft.models import generate_anywhere
from hf_pardraft.models.base import CUSTOM_GENERATE
from published_checkpoints import LAYOUTS
from tiny_models import random_prompt, tiny_drafter, tiny_target

KINDS = tuple(DRAFTER_NAMES)
AUTO_CLASSES = (AutoModel, AutoModelForCausalLM)
PROMPT = random_prompt(6)
OPTIONS = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False, "max_new_tokens": 12}
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def plain(tiny_family):
    tokenizer = AutoTokenizer.from_pretrained(tiny_family / "target")
    tokenizer.chat_template = CHAT
    return pipeline("text-generation", model=str(tiny_family / "target"), tokenizer=tokenizer, device="cpu")


def drafting(plain, tiny_family, assistant):
    return pipeline(
        "text-generation",
        model=str(tiny_family / "target"),
        tokenizer=plain.tokenizer,
        assistant_model=assistant,
        device="cpu",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_that_names_a_drafter_uses_it(plain, tiny_family, kind):
    drafting_pipeline = drafting(plain, tiny_family, str(tiny_family / kind))
    drafter = drafting_pipeline.assistant_model
    assert type(drafter) is type(AutoDrafter.from_pretrained(tiny_family / kind))
    assert (drafter.dtype, drafter.device) == (plain.model.dtype, plain.model.device)
    chats = [[{"role": "user", "content": text}] for text in ("Add.", "Return the sum of a and b.")]
    for inputs in ("def add(a, b):", ["def add(a, b):", "class"], chats):
        for options in ({"do_sample": False}, {"temperature": 0.9}):
            drafter.last_stats = None
            torch.manual_seed(0)
            expected = plain(inputs, max_new_tokens=12, batch_size=2, **options)
            torch.manual_seed(0)
            assert drafting_pipeline(inputs, max_new_tokens=12, batch_size=2, **options) == expected
            assert drafter.last_stats.rounds > 0
            assert kind != "pard" or drafter.last_stats.tau > 1


def test_a_pipeline_takes_a_drafter_that_is_loaded_already_whatever_its_config_says_of_special_tokens(
    plain, tiny_family
):
    drafter = AutoDrafter.from_pretrained(tiny_family / "dflash")
    drafter.config.bos_token_id = 5
    found = drafting(plain, tiny_family, drafter)
    assert (found.assistant_model, found.assistant_tokenizer) == (drafter, None)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert found("class", **options) == plain("class", **options)
    assert drafter.last_stats.rounds > 0
    assert plain("class", assistant_model=drafter, **options) == plain("class", **options)


def test_a_pipelines_ordinary_assistant_is_loaded_as_ever(plain, tiny_family):
    found = drafting(plain, tiny_family, str(tiny_family / "target"))
    assert type(found.assistant_model) is type(plain.model)


@pytest.mark.parametrize("auto_class", AUTO_CLASSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_classes_give_the_drafter_of_every_published_layout(tmp_path, layout, auto_class):
    folder = LAYOUTS[layout](tmp_path / layout)
    if layout == "muse_glimmer":
        # Transformers has this class itself, and registers it as no causal LM.
        assert type(AutoModel.from_pretrained(folder)).__name__ == "MuseGlimmerAssistantModel"
        return
    found, info = auto_class.from_pretrained(folder, dtype=torch.float16, output_loading_info=True)
    expected = AutoDrafter.from_pretrained(folder, dtype=torch.float16)
    assert type(found) is type(expected)
    assert not info["missing_keys"]
    weights = expected.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in found.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_auto_classes_give_the_drafter_that_was_saved(tiny_family, kind, own_modules):
    expected = type(AutoDrafter.from_pretrained(tiny_family / kind))
    for auto_class in AUTO_CLASSES:
        assert type(auto_class.from_pretrained(str(tiny_family / kind))) is expected
        config = AutoConfig.from_pretrained(tiny_family / kind)
        assert type(auto_class.from_pretrained(tiny_family / kind, config=config)) is expected
        trusted = auto_class.from_pretrained(tiny_family / kind, trust_remote_code=True)
        assert (type(trusted).__name__, trusted.config.drafter_kind) == (expected.__name__, kind)


def test_all_else_is_loaded_as_ever(tiny_family, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    assert type(target).__module__.startswith("transformers.")
    # A config of one's own says what one wants.
    asked_for = AutoModelForCausalLM.from_pretrained(tiny_family / "pard", config=target.config)
    assert type(asked_for) is type(target)
    for nowhere in ("someone/nowhere", tmp_path, tmp_path / "nothing"):
        with pytest.raises((OSError, ValueError)):
            AutoModel.from_pretrained(nowhere)


def test_uninstalling_restores_what_loads(as_transformers_loads, tiny_family):
    assert all("by_name" not in str(auto_class.from_pretrained) for auto_class in AUTO_CLASSES)
    assert pipelines.load_assistant_model.__module__.startswith("transformers")
    assert type(AutoModelForCausalLM.from_pretrained(tiny_family / "pard")).__module__.startswith("transformers.")
    with pytest.raises(AttributeError, match="str"):
        tiny_target("llama").generate(PROMPT, assistant_model="someone/drafter", **OPTIONS)
    by_name.install()
    by_name.install()
    assert type(AutoModelForCausalLM.from_pretrained(tiny_family / "pard")).__name__ == "PardQwen3"
    by_name.uninstall()


@pytest.mark.parametrize("as_name", [str, Path])
def test_generate_takes_a_drafter_by_name_and_loads_it_once(tmp_path, monkeypatch, as_name):
    target, loads = tiny_target("llama"), []
    load = by_name.load_beside
    monkeypatch.setattr(by_name, "load_beside", lambda *args: loads.append(load(*args)) or loads[-1])
    expected = target.generate(PROMPT, **OPTIONS)
    tiny_drafter("dflash", target).save_pretrained(tmp_path)
    for _ in range(2):
        assert torch.equal(target.generate(PROMPT, assistant_model=as_name(tmp_path), **OPTIONS), expected)
    config = GenerationConfig(**OPTIONS)
    nothing = [None] * 4
    assert torch.equal(target.generate(PROMPT, config, *nothing, as_name(tmp_path)), expected)
    assert [type(drafter) for drafter in loads] == [DFlashDrafter]
    assert loads[0].last_stats.rounds > 0
    # What was saved there since is another drafter.
    tiny_drafter("dflash", target, seed=2).save_pretrained(tmp_path)
    target.generate(PROMPT, assistant_model=as_name(tmp_path), **OPTIONS)
    assert len(loads) == 2
    # It follows its target.
    target.double().generate(PROMPT, assistant_model=as_name(tmp_path), **OPTIONS)
    assert [drafter.dtype for drafter in loads] == [torch.float32, torch.float32, torch.float64]
    with pytest.raises(OSError, match="nothing"):
        target.generate(PROMPT, assistant_model=as_name(tmp_path / "nothing"), **OPTIONS)
    references = [weakref.ref(drafter) for drafter in loads]
    loads.clear()
    del target, _
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_a_drafter_that_is_named_for_an_offloaded_target_is_loaded_whole(tmp_path):
    target = tiny_target("llama")
    expected = target.generate(PROMPT, **OPTIONS)
    tiny_drafter("dflash", target).save_pretrained(tmp_path)
    cpu_offload(target)
    assert target.device.type == "meta"
    assert torch.equal(target.generate(PROMPT, assistant_model=str(tmp_path), **OPTIONS), expected)


# custom_generate


@pytest.fixture(scope="module", params=["pard", "dflash", "dart"])
def saved(request, tmp_path_factory):
    """A target, its drafter, and the folder where that is saved."""
    target, folder = tiny_target("qwen3"), tmp_path_factory.mktemp(request.param)
    drafter = tiny_drafter(request.param, target)
    drafter.save_pretrained(folder)
    return target, drafter, folder


@pytest.mark.parametrize("trust", [{"trust_remote_code": True}, {}], ids=["trusted", "untrusted"])
@pytest.mark.parametrize("passes", ["drafter", "name", "nothing"])
@pytest.mark.parametrize("has_code", [True, False])
def test_custom_generate_drafts_with_what_is_saved_there(saved, own_modules, tmp_path, trust, passes, has_code):
    target, drafter, folder = saved
    if not has_code:
        folder = tmp_path / "bare"
        drafter.save_pretrained(folder, with_code=False)
    expected = target.generate(PROMPT, **OPTIONS)
    passed = {"drafter": {"assistant_model": drafter}, "name": {"assistant_model": str(folder)}, "nothing": {}}[passes]
    drafter.last_stats = None
    found = target.generate(PROMPT, custom_generate=str(folder), **passed, **trust, **OPTIONS)
    assert torch.equal(found, expected)
    used = drafter if passes == "drafter" else by_name.drafter_named(str(folder), target)
    assert used.last_stats.rounds > 0


def test_the_file_alone_asks_for_the_drafter_and_loads_one_by_name(saved, tmp_path):
    """As where the package is installed, and the file is what imports it: transformers has called it already."""
    target, _, folder = saved
    with pytest.raises(ValueError, match="assistant_model the drafter"):
        generate_anywhere.generate(inputs=PROMPT, model=target, assistant_model=None, **OPTIONS)
    found = generate_anywhere.generate(inputs=PROMPT, model=target, assistant_model=str(folder), **OPTIONS)
    assert torch.equal(found, target.generate(PROMPT, **OPTIONS))
    assert by_name.drafter_named(str(folder), target).last_stats.rounds > 0


def test_a_drafter_with_its_own_code_still_writes_by_itself(tmp_path, own_modules):
    drafter = tiny_drafter("pard", tiny_target("qwen3"))
    drafter.save_pretrained(tmp_path)
    trusted = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert not isinstance(trusted, PardDrafter)
    expected = GenerationMixin.generate(drafter, PROMPT, **OPTIONS)
    assert torch.equal(trusted.generate(inputs=PROMPT, **OPTIONS), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_family_has_what_custom_generate_runs(kind):
    assert (SHIPPED_FAMILY / kind / CUSTOM_GENERATE).read_text() == Path(generate_anywhere.__file__).read_text()


# Continuous batching


def test_a_drafter_beside_a_paged_cache_is_refused_in_one_line(tmp_path):
    target = tiny_target("llama")
    drafter = tiny_drafter("pard", target)
    drafter.save_pretrained(tmp_path)
    for assistant in (drafter, str(tmp_path)):
        with pytest.raises(ValueError, match="leave it out to draft") as refused:
            target.generate(PROMPT, cache_implementation="paged", assistant_model=assistant, **OPTIONS)
        assert len(str(refused.value)) < 250
        assert "\n" not in str(refused.value)
