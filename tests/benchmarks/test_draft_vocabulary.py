"""What benchmarks/draft_vocabulary.py counts."""

import gzip
import json

import pytest
import torch

from draft_vocabulary import counts_of, counts_of_answers, times_of, worth_of
from tiny_models import random_prompt, tiny_drafter, tiny_target

HEAD_ROW = 32 * 4


@pytest.mark.parametrize("kind", ["dflash", "pard"])
def test_a_draft_reads_its_layers_and_the_rows_of_its_tokens(kind):
    target = tiny_target("llama")
    drafter = tiny_drafter(kind, target)
    found = times_of(drafter, target, {"8": torch.arange(8), "all": None}, block=4, repeats=1)
    assert [found[name]["bytes"]["head"] for name in ("8", "all")] == [8 * HEAD_ROW, 64 * HEAD_ROW]
    tables = 64 * 32 * (2 if kind == "pard" else 0)
    assert found["8"]["bytes"]["layers"] == 4 * (sum(weight.numel() for weight in drafter.parameters()) - tables)


@pytest.mark.parametrize("name", ["dialogues.jsonl", "dialogues.jsonl.gz"])
def test_tokens_are_counted_in_the_answers_of_dialogues(tmp_path, name):
    rows = [{"messages": [{"role": "user", "content": "b b b"}, {"role": "assistant", "content": "a c c"}]}] * 2
    with (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)

    def tokenizer(text, add_special_tokens):
        return {"input_ids": ["abc".index(word) for word in text.split()]}

    assert counts_of_answers([tmp_path / name], tokenizer, 4).tolist() == [2, 0, 4, 0]


def test_the_share_of_the_text_that_can_be_proposed():
    target, prompts = tiny_target("llama"), torch.cat([random_prompt(5, seed) for seed in range(3)])
    counts = counts_of(target, prompts, 12)
    assert int(counts.sum()) == 3 * 12
    texts = [target.generate(prompt[None], do_sample=False, max_new_tokens=12)[0] for prompt in prompts]
    drafter = tiny_drafter("dflash", target)
    for ids, share in ((counts.nonzero().flatten(), 1.0), (counts.eq(0).nonzero().flatten(), 0.0)):
        drafter.set_draft_vocabulary(ids)
        found = worth_of(target, drafter, prompts, 12, texts)
        assert found["text_known"] == share
        assert (found["tau"] == 1.0) >= (share == 0.0)
    with pytest.raises(RuntimeError, match="changed the text"):
        worth_of(target, drafter, prompts, 12, [text.flip(0) for text in texts])
