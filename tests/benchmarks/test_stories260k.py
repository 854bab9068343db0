"""The stories benchmark runs on drafters that an earlier run left, and puts both temperatures into one table."""

import json

import pytest

import stories260k
from in_process import run_main
from tiny_models import tiny_drafter, tiny_target
from tiny_tokenizers import tiny_tokenizer

KINDS = ("PARD", "DFlash", "DFlare", "DART")


@pytest.fixture
def work(tmp_path):
    """A tiny target, stories, and what training would leave of four drafters."""
    tokenizer = tiny_tokenizer()
    target = tiny_target("llama", vocab_size=len(tokenizer))
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    for kind in KINDS:
        tiny_drafter(kind.lower(), target).save_pretrained(tmp_path / "work" / kind)
        (tmp_path / "work" / f"{kind}.json").write_text(json.dumps({"steps": 0}))
    names = ("Lily", "Tom", "Ben", "Mia")
    stories = [f"Once upon a time there was a cat that {name} liked. {name} was glad." for name in names]
    (tmp_path / "stories.txt").write_text("\n".join(stories))
    return tmp_path


def test_all_drafters_proposals_and_temperatures_are_in_one_table(work):
    files = {"target": "target", "work": "work", "output": "result.json"}
    files |= {"training-text": "stories.txt", "prompt-text": "stories.txt"}
    words = [*(f"--{name}={work / file}" for name, file in files.items()), "--prompts=2", "--max-new-tokens=6"]
    words += ["--repeats=1", "--temperatures", "0", "1"]
    assert "PARD.json was made with {'steps': 0}, not {'steps': 1600}" in str(run_main(stories260k.main, *words).code)
    done = run_main(stories260k.main, *words, "--steps=0")
    assert done.code == 0
    names = ["plain", *(f"{kind}{tree}" for kind in KINDS for tree in ("", ", tree", ", tree + n-gram"))]
    report = json.loads((work / "result.json").read_text())
    assert [(row["temperature"], row["name"]) for row in report["rows"]] == [
        (t, name) for t in (0, 1) for name in names
    ]
    assert all(row["tau"] >= 1 and row["tokens_per_second"] > 0 for row in report["rows"])
    assert [row["identical"] for row in report["rows"]] == [True] * 13 + [None] * 13
    assert report["prompts"] == 2
    head, _, *lines = [line.strip("| ").split(" | ") for line in done.out.splitlines() if line.startswith("|")]
    assert [line[0] for line in lines] == names
    assert {"tau, T=0", "tau, T=1", "tokens/s, T=0", "tokens/s, T=1"} < set(head)
    assert float(lines[1][head.index("tau, T=1") + 1]) == pytest.approx(report["rows"][14]["tau"], abs=0.006)
