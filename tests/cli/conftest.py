"""A folder to run commands in."""

import json
import shutil
from pathlib import Path

import pytest

from tiny_tokenizers import SAMPLE_TEXT


@pytest.fixture(scope="module")
def work(tiny_family, tmp_path_factory) -> Path:
    """A folder with the tiny family and good input."""
    work = tmp_path_factory.mktemp("work")
    shutil.copytree(tiny_family, work / "family")
    texts = [{"text": SAMPLE_TEXT[start:]} for start in range(0, 60, 3)]
    (work / "text.jsonl").write_text("\n".join(map(json.dumps, texts)))
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    (work / "chat.jsonl").write_text("\n".join([json.dumps({"messages": chat})] * 20))
    (work / "prompts.txt").write_text("def add(a, b):\nclass Point:\n")
    return work


@pytest.fixture
def in_work(work, monkeypatch):
    """Run the test in `work`."""
    monkeypatch.chdir(work)
