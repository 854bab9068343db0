"""The Space: both texts are the same, closing the page stops them, and no text becomes part of the page's code."""

import importlib
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_pardraft import AutoDrafter

SPACE = Path(__file__).parents[2] / "examples" / "space"
NEW = 24


@pytest.fixture
def watching(monkeypatch):
    monkeypatch.syspath_prepend(str(SPACE))
    return importlib.import_module("watching")


@pytest.fixture
def models(tiny_family):
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    return (
        target,
        AutoTokenizer.from_pretrained(tiny_family / "target"),
        AutoDrafter.from_pretrained(tiny_family / "pard"),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_both_ways_show_what_generate_writes(watching, models, temperature):
    target, tokenizer, drafter = models
    ids = tokenizer("def add(a, b):", return_tensors="pt").input_ids
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    settings = {"max_new_tokens": NEW, "seed": 3, **sampling}
    *_, drafted = watching.watch(target, tokenizer, ids, drafter, **settings)
    *_, plain = watching.watch(target, tokenizer, ids, **settings)
    torch.manual_seed(3)
    mask = torch.ones_like(ids)
    expected = target.generate(ids, attention_mask=mask, max_new_tokens=NEW, **sampling)[0, ids.shape[1] :]
    text = tokenizer.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(drafted.pieces) == "".join(plain.pieces) == text
    assert drafted.timing.num_tokens == plain.timing.num_tokens == len(expected)
    assert max(drafted.timing.sizes) > 1
    assert drafted.points("x")["tokens"][-1] == len(expected)
    assert len(set(map(len, drafted.points("x").values()))) == 1
    num_drafted = sum(map(bool, drafter.last_stats.drafted_per_round))
    assert drafted.told().endswith(f"drafts in {num_drafted} of {len(drafted.timing.sizes)} runs")
    assert "tau" in drafted.told()
    assert "tau" not in plain.told()
    assert "drafts" not in plain.told()


def test_closing_the_page_stops_the_text(watching, models, monkeypatch):
    target, tokenizer, _ = models
    monkeypatch.setattr(watching, "EACH", 0.001)
    ids = tokenizer("def add(a, b):", return_tensors="pt").input_ids
    before, recorders = {*threading.enumerate()}, []
    original = watching.RunRecorder

    def recorder_of(show):
        def slowly(run):
            time.sleep(0.002)
            show(run)

        recorders.append(original(slowly))
        return recorders[0]

    monkeypatch.setattr(watching, "RunRecorder", recorder_of)
    text = watching.watch(target, tokenizer, ids, None, max_new_tokens=200, do_sample=False)
    next(text)
    text.close()
    # Threads of other tests may end meanwhile.
    assert {*threading.enumerate()} <= before
    assert len(recorders[0].ids) < 200


def test_what_goes_wrong_in_the_thread_is_raised_in_the_page(watching, models):
    target, tokenizer, drafter = models
    ids = tokenizer("x", return_tensors="pt").input_ids
    with pytest.raises(ValueError, match="num_beams"):
        list(watching.watch(target, tokenizer, ids, drafter, max_new_tokens=4, num_beams=3))


def test_a_text_is_no_code_of_the_page(watching):
    html = watching.Written(["<script>", "a & b"]).html(marks=True)
    assert "<script>" not in html
    assert "&lt;script&gt;</span>" in html
    assert html.count("background") == 2
    assert "background" not in watching.Written(["a"]).html(marks=False)


def test_the_spaces_front_matter_names_what_is_there():
    front = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert front["sdk"] == "gradio"
    assert (SPACE / front["app_file"]).is_file()
    assert f"gradio {front['sdk_version']}" in (SPACE / "requirements.txt").read_text(encoding="utf-8")
    # What Spaces allow.
    assert len(front["short_description"]) <= 60


def test_the_page_streams_both_texts(watching, tiny_family):
    pytest.importorskip("gradio")
    app = importlib.import_module("app")
    models = app.SideBySide(str(tiny_family / "target"), str(tiny_family / "pard"), "float32")
    *_, (drafted, told, plain, _, points) = models.write("def f(", NEW, 0, 0, True, True)
    assert drafted.count("background") > 1
    assert "background" not in plain
    assert "tokens/s" in told
    assert set(points["way"]) == set(app.WAYS)
    assert app.build(models).fns
    assert models.precision == ""
    # An empty field for the seed.
    assert list(models.write("def f(", 8, 0.9, None, True, False))


def test_the_page_tells_its_user_and_not_its_log_what_is_wrong_with_a_prompt(watching, tiny_family):
    pytest.importorskip("gradio")
    app = importlib.import_module("app")
    models = app.SideBySide(str(tiny_family / "target"), str(tiny_family / "pard"), "bfloat16")
    with pytest.raises(app.gr.Error, match="Write something") as refused:
        next(models.write("  ", NEW, 0, 0, True, False))
    assert not refused.value.print_exception
    context = models.target.config.max_position_embeddings
    with pytest.raises(app.gr.Error, match=f"target's context is {context}: shorten") as refused:
        next(models.write("x = 1\n" * context, NEW, 0, 0, True, False))
    assert not refused.value.print_exception
    assert models.room(torch.zeros(1, context - 3), NEW) == 3
    assert models.precision.startswith("In bfloat16 a near tie")
