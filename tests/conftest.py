"""What several rooms' tests share: no network, and a tiny untrained family on disk."""

import gc
import os

# Before torch and transformers are imported. A test must fail, not download; and tiny models only wait for second threads.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, dynamic_module_utils

from hf_pardraft import by_name
from hf_pardraft.generation import settings
from hf_pardraft.models.modeling_dart import DartDrafter
from hf_pardraft.models.modeling_dflare import DFlareDrafter
from hf_pardraft.models.modeling_dflash import DFlashDrafter
from hf_pardraft.models.modeling_pard import PardDrafter
from progress_lock import take_own_progress_lock
from tiny_tokenizers import CODE_VOCABULARY, tiny_tokenizer

# Tests count rounds and drafts, which else depend on the clock. Those of the schedule ask for it.
settings.DEFAULT_SCHEDULE = "fixed"
take_own_progress_lock()
# Of each seed an accelerator that isn't there would be told, should it come, and where in the code that was.
for accelerator in (torch.cuda, torch.xpu, torch.mtia):
    if not accelerator.is_available():
        accelerator.manual_seed_all = lambda seed: None


@pytest.fixture(scope="module", autouse=True)
def frozen_modules() -> None:
    """Leave the million objects of what was imported, which stay, out of every `gc.collect`: each training asks for one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def free_progress_lock() -> Iterator[None]:
    """A bar that is interrupted as it is drawn leaves its lock taken: the next test has another one."""
    yield
    take_own_progress_lock()


def tiny_target(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=CODE_VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory) -> Path:
    """A folder like the shipped demo family, with random weights: its PARD drafter is as good as its target."""
    folder = tmp_path_factory.mktemp("family")
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "target")
    tiny_target(tokenizer).save_pretrained(folder / "target")
    target = Qwen3ForCausalLM.from_pretrained(folder / "target")
    PardDrafter.from_causal_lm(target, tokenizer=tokenizer).save_pretrained(folder / "pard")
    shape = {"num_layers": 1, "block_size": 4, "tokenizer": tokenizer}
    DFlashDrafter.for_target(target, **shape).save_pretrained(folder / "dflash")
    DFlareDrafter.for_target(target, **shape).save_pretrained(folder / "dflare")
    DartDrafter.for_target(target, draft_length=3).save_pretrained(folder / "dart")
    return folder


@pytest.fixture
def own_modules(monkeypatch, tmp_path):
    """Code that is loaded with a checkpoint goes into a folder of the test's, and is forgotten afterwards."""
    usual = str(dynamic_module_utils.HF_MODULES_CACHE)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != usual])

    def forget():
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            del sys.modules[name]

    # A package that another test has loaded knows nothing of this one's folder.
    forget()
    yield
    forget()


@pytest.fixture
def as_transformers_loads():
    """Transformers' Auto classes and pipelines as they are without this package."""
    by_name.uninstall()
    yield
    by_name.install()
