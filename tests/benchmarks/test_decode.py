"""The decode benchmark: all columns in one run, simulated rows that say so, nothing measured twice, and the shapes it names."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import decode
from acceptance_profile import expected_tau
from compiled_cases import settle, texts_of
from in_process import run_main
from tiny_models import batch_of, make_lasting_oracle, tiny_drafter, tiny_target

NAMES = ("ours", "ours compiled", "ours, tree 16", "ours compiled, tree 16")


def run_quickly(folder: Path, *words: str) -> tuple[list[dict], str]:
    """What was measured, and what was printed."""
    quick = ["--quick", "--targets", "random100m", "--repeats", "1", "--forwards", "2", "--max-new-tokens", "32"]
    quick += ["--backend", "eager", "--work", str(folder / "work"), "--output", str(folder / "decode.json")]
    done = run_main(decode.main, *quick, *words)
    assert done.code == 0
    return json.loads((folder / "decode.json").read_text())["runs"], done.out


def test_all_columns_are_measured_in_one_run_and_only_once(tmp_path, monkeypatch):
    (alone,), printed = run_quickly(tmp_path)
    names = ["plain", "plain compiled", *(f"DFlash, {name}" for name in NAMES), "DFlash, stock DFlash loop"]
    assert [row["name"] for row in alone["rows"]] == names
    assert alone["simulated"]
    assert alone["machine"]
    assert str(tmp_path) not in alone["command"]
    assert all(row["identical"] for row in alone["rows"])
    plain, compiled, *drafted = alone["rows"]
    assert plain["speedup"] == compiled["speedup_over_compiled"] == 1
    # The same luck in every loop.
    assert len({row["tau"] for row in drafted if "tree" not in row["name"]}) == 1
    for row in drafted:
        assert row["tau"] > 2
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
        assert row["speedup_over_compiled"] == pytest.approx(row["tokens_per_second"] / compiled["tokens_per_second"])
        assert row["acceptance"].startswith("SIMULATED")
        is_ours = "ours" in row["name"]
        assert (row["efficiency"] is not None) == (row["milliseconds_by_part"] is not None) == is_ours
        assert (row["compile_seconds"] is not None) == ("compiled" in row["name"])
    assert "SIMULATED ACCEPTANCE" in printed
    assert "SIMULATED DFlash, ours compiled" in printed
    with monkeypatch.context() as patched:
        patched.setattr(decode, "measure", lambda *arguments: pytest.fail("it was measured before"))
        assert run_quickly(tmp_path)[0] == [alone]
    runs, _ = run_quickly(tmp_path, "--columns", "eager", "stock", "--batch-sizes", "2", "--plots")
    assert [run["batch_size"] for run in runs] == [1, 2]
    # transformers' own loop takes one text at a time.
    assert [row["name"] for row in runs[1]["rows"]] == ["plain", "DFlash, ours", "DFlash, ours, tree 16"]
    assert (tmp_path / "decode_random100m.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-4b", 4.022), ("qwen3-8b", 8.191), ("llama-3.1-8b", 8.030), ("drafter", 1.236)]
)
def test_shapes_have_as_many_weights_as_the_published_models(name, billions):
    import true_shapes

    config = true_shapes.llama_32_1b() if name == "drafter" else true_shapes.CONFIGS[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.001)


@pytest.mark.parametrize("kind", ["pard", "dflash", "dart"])
@pytest.mark.parametrize("compiled", [False, "in one step", "in several steps"])
def test_forwards_are_repeated_in_turns_in_the_middle_of_a_text_that_stays_the_same(monkeypatch, kind, compiled):
    from decode_limits import CompiledForwards, EagerForwards

    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    if compiled == "in several steps":
        # As on an accelerator.
        settle(monkeypatch, is_one_step=lambda decoding: False)
    target = tiny_target("qwen3")
    drafter = make_lasting_oracle(tiny_drafter(kind, target), texts_of(target, batch := batch_of(6)), [0.8] * 4, 0.0)
    how = {"cache_implementation": "static"} if compiled else {}
    options = {**batch, "assistant_model": drafter, "do_sample": False, "max_new_tokens": 20, **how}
    expected, stats = target.generate(**options), drafter.last_stats
    forwards = CompiledForwards(target, 2, 3) if compiled else EagerForwards(target, drafter, 3, 3)
    with forwards.watching():
        assert torch.equal(target.generate(**options), expected)
    assert drafter.last_stats.tokens_per_round == stats.tokens_per_round
    assert {part: len(seconds) for part, seconds in forwards.seconds().items()} == {"draft": 3, "verify": 3}


def test_profiles_are_those_that_the_papers_report():
    from true_shapes import PUBLISHED

    rates = {key: published.profile.rates(published.depth) for key, published in PUBLISHED.items()}
    assert expected_tau(rates["qwen3-4b", "DFlare"]) == pytest.approx(7.47)
    assert expected_tau(rates["qwen3-8b", "DFlare"]) == pytest.approx(7.33)
    assert expected_tau(rates["qwen3-4b", "DART"]) == pytest.approx(3.87)
    pard = rates["llama-3.1-8b", "PARD"]
    assert pard[0] == pytest.approx(0.905)
    assert sum(pard[:4]) / 4 == pytest.approx(0.875)


@pytest.mark.parametrize("tied", [True, False])
def test_a_round_reads_every_weight_but_embeddings_and_a_borrowed_head_twice(tied):
    from decode_limits import bytes_read

    target = tiny_target("qwen3", tie_word_embeddings=tied)

    def size(model) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    matrix = target.get_input_embeddings().weight.numel()
    read = size(target) - (0 if tied else matrix)
    dflash, dart, pard = (tiny_drafter(kind, target) for kind in ("dflash", "dart", "pard"))
    assert bytes_read(target, dflash) == 4 * (read + size(dflash) + matrix)
    assert bytes_read(target, dart) == 4 * (read + size(dart))
    own_matrix = pard.get_input_embeddings().weight.numel()
    is_tied = pard.get_output_embeddings().weight is pard.get_input_embeddings().weight
    assert bytes_read(target, pard) == 4 * (read + size(pard) - (0 if is_tied else own_matrix))
