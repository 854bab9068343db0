"""What the results of `pardraft eval` say besides their rows: what was measured, where, when and how."""

import platform
import shlex
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.settings import settings_in
from ..models.base import ParallelDrafter
from ..pairing.remembered import public_name
from .models import DrafterSource
from .plan import EvalRequest, Plan

DISTRIBUTIONS = ("hf-pardraft", "torch", "transformers", "tokenizers", "accelerate", "datasets")


def facts_of(
    request: EvalRequest,
    plan: Plan,
    target: PreTrainedModel,
    drafters: dict[str, ParallelDrafter],
    prompt_facts: dict[str, Any],
) -> dict[str, Any]:
    """The JSON's top level, but for the rows."""
    simulation = None
    if plan.profile is not None:
        simulation = {"acceptance": str(plan.profile), "runner_up": request.simulate_runner_up}
    return {
        "simulated": plan.profile is not None,
        "simulation": simulation,
        "machine": machine(target.device),
        "command": shlex.join(["pardraft", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": installed_versions(),
        "target": public_name(target) or Path(request.target).resolve().name,
        "random_weights": request.random_weights,
        "dtype": str(target.dtype).removeprefix("torch."),
        "drafters": {name: describe_drafter(plan.drafters[name], drafter) for name, drafter in drafters.items()},
        "prompts": prompt_facts,
        "max_new_tokens": request.max_new_tokens,
        "repeats": request.repeats,
        "seed": request.seed,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "generate_arguments": plan.generate_arguments,
    }


def describe_drafter(source: DrafterSource, drafter: ParallelDrafter) -> dict[str, Any]:
    """Where a drafter is from, and the settings that it brings along: a row's own go before them."""
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
