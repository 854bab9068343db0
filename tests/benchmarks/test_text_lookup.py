"""The benchmark of branches from the text runs, and keeps what it measured before."""

import json

import torch

import text_lookup
from in_process import run_main
from tiny_models import random_prompt, tiny_drafter, tiny_target


def test_every_way_has_a_row_and_writes_the_same_text(tmp_path):
    output = tmp_path / "lookup.json"
    kinds = ["PARD", "DFlash", "DFlare", "DART"]
    same = {"target": "demo family", "drafters": kinds, "category": "Python code", "simulated_rate": None, "rows": []}
    alone, narrow = ({**same, "tree_budget": 16, "schedules": ["auto"]}, {**same, "tree_budget": 8, "schedules": []})
    output.write_text(json.dumps({"runs": [alone, narrow]}))
    quick = [
        "--family",
        "--prompts",
        "1",
        "--max-new-tokens",
        "12",
        "--schedules",
        "fixed",
        "auto",
        "--output",
        str(output),
    ]
    assert run_main(text_lookup.main, *quick).code == 0
    *kept, run = json.loads(output.read_text())["runs"]
    assert kept == [alone, narrow]
    rows = {row["name"]: row for row in run["rows"]}
    assert {"plain", "prompt lookup", "PARD, fixed", "PARD and the text, fixed", "DART and the text, auto"} <= {*rows}
    assert rows["plain"]["tau"] == 1
    assert rows["PARD and the text, fixed"]["tau"] > 1.5
    assert all(row["same_texts"] == row["texts"] == 1 for row in rows.values())
    assert str(tmp_path) not in json.dumps(run)


def test_texts_of_one_token_are_left_out(tmp_path):
    output = tmp_path / "lookup.json"
    done = run_main(text_lookup.main, "--family", "--prompts=1", "--max-new-tokens=1", f"--output={output}")
    assert done.code == 0
    assert "the target writes no text of two tokens" in done.out
    assert not output.exists()


def test_a_simulated_drafter_is_right_as_often_as_it_is_told():
    target = tiny_target("llama")
    drafter = tiny_drafter("pard", target, depth=4)
    simulated = text_lookup.Simulated(drafter, right=0.7)
    prompt = random_prompt(5)
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 200}
    (simulated.text,) = plain = target.generate(prompt, **options)
    options["num_assistant_tokens"] = 4
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), plain)
    first, second, *_ = drafter.last_stats.per_position_acceptance
    assert 0.55 < first < 0.85
    assert 0.3 < second < 0.65
