"""lm-evaluation-harness, told of a drafter on its command line: same scores from fewer forwards of the target."""

import json
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from hf_pardraft import by_name
from hf_pardraft.demo.family import SHIPPED_FAMILY

EXAMPLE = Path(__file__).parents[2] / "examples" / "lm_eval"
DOCUMENTED = Path(__file__).parents[2] / "docs" / "decoding.md"


class AtTokens(StoppingCriteria):
    """Ends a text at some tokens, as the harness's criteria do: they remember which items have ended."""

    def __init__(self, tokens, batch: int) -> None:
        self.tokens, self.ended = torch.tensor(tokens), [False] * batch

    def __call__(self, input_ids, scores, **_) -> bool:
        for i, has_ended in enumerate(self.ended):
            self.ended[i] = has_ended or bool((input_ids[i, -1] == self.tokens).any())
        return all(self.ended)


@pytest.mark.parametrize("batch", [1, 2])
def test_what_the_harness_asks_of_generate_is_drafted(tiny_family, own_modules, batch):
    """Its call, with a drafter's name in --gen_kwargs; where the harness itself is not installed, too."""
    target = AutoModelForCausalLM.from_pretrained(tiny_family / "target")
    ids = torch.randint(3, 200, (batch, 6), generator=torch.Generator().manual_seed(1))
    folder = str(tiny_family / "pard")
    named = {"custom_generate": folder, "assistant_model": folder, "trust_remote_code": True}
    (options,) = [line for line in DOCUMENTED.read_text().splitlines() if line.startswith("lm_eval ")]
    assert shlex.split(options)[-1] == ",".join(f"{key}={value}" for key, value in named.items()).replace(
        folder, "my-drafter"
    )

    def call(**more):
        criteria = [AtTokens(range(40), batch)]
        fixed = {"max_length": 26, "pad_token_id": 0, "use_cache": True, "do_sample": False}
        mask = torch.ones_like(ids)
        return target.generate(input_ids=ids, attention_mask=mask, stopping_criteria=criteria, **fixed, **more)

    assert torch.equal(call(**named), call())
    assert by_name.drafter_named(folder, target).last_stats.tau > 1


def test_the_documented_task_has_the_same_scores_from_fewer_forwards(tmp_path, monkeypatch, capsys, own_modules):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    folders = [str(SHIPPED_FAMILY / name) for name in ("target", "pard")]
    monkeypatch.setattr(sys, "argv", ["compare.py", *folders, "--limit", "2", "--json", str(tmp_path / "found.json")])
    runpy.run_path(str(EXAMPLE / "compare.py"), run_name="__main__")
    plain, drafted = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert drafted["exact_match,none"] == plain["exact_match,none"] > 0
    assert drafted["forwards"] < plain["forwards"] / 2
