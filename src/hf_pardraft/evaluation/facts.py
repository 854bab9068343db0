"""What the results of `pardraft eval` say besides their rows: what was measured, where, when and how."""

import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.settings import settings_in
from ..models.base import ParallelDrafter
from ..pairing.remembered import public_name
from .models import DrafterSource
from .plan import EvaluationPlan

DISTRIBUTIONS = ("hf-pardraft", "torch", "transformers", "tokenizers", "accelerate", "datasets")


def facts_of(
    plan: EvaluationPlan, target: PreTrainedModel, drafters: dict[str, ParallelDrafter], prompt_facts: dict[str, Any]
) -> dict[str, Any]:
    """The JSON's top level, but for the rows."""
    condition = plan.conditions[0]
    sources = plan.contenders.drafters
    return {
        "simulated": False,
        "simulation": None,
        "machine": machine(target.device),
        "command": shlex.join(["pardraft", *map(public_word, sys.argv[1:])]),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": installed_versions(),
        "target": public_name(target) or Path(plan.target).resolve().name,
        "random_weights": plan.random_weights,
        "dtype": str(target.dtype).removeprefix("torch."),
        "drafters": {name: describe_drafter(sources[name], drafter) for name, drafter in drafters.items()},
        "prompts": prompt_facts,
        "max_new_tokens": condition.max_new_tokens,
        "repeats": condition.repeats,
        "seed": condition.seed,
        "top_k": condition.top_k,
        "top_p": condition.top_p,
        "generate_arguments": condition.generate_arguments,
    }


def public_word(word: str) -> str:
    """A word of a command line, of a path on this machine its name only: results are published."""
    before, equals, path = word.rpartition("=")
    return f"{before}{equals}{Path(path).name}" if Path(path).is_absolute() else word


def describe_drafter(source: DrafterSource, drafter: ParallelDrafter) -> dict[str, Any]:
    """Where a drafter is from, and the settings that it brings along: those of a result row take precedence."""
    return {
        "source": source.public_source,
        "kind": drafter.config.drafter_kind,
        "depth": drafter.draft_depth,
        "settings": settings_in(drafter.generation_config),
    }


def machine(device: torch.device) -> str:
    """What the target ran on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {torch.cuda.device_count()} visible"
    threads = f"{torch.get_num_threads()} threads"
    return (
        f"{platform.machine()} CPU, {threads}"
        if device.type == "cpu"
        else f"{device.type} ({platform.machine()}), {threads}"
    )


def installed_versions() -> dict[str, str]:
    """The versions of what a measurement or a bug depends on."""
    installed = {}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed
