"""What is asked of `pardraft regenerate`, looked at before a model is loaded: where prompts come from, who writes, and where."""

import os

import torch


def check_prompts(
    dataset: str | None, self_prompts: int | None, config: str | None, split: str | None, server: str | None
) -> None:
    """Raise a `ValueError` unless it is clear where prompts come from."""
    if (dataset is None) == (self_prompts is None):
        raise ValueError("expected where prompts come from, either a data set or --self-prompts: pass one of them")
    for name, value in (("config", config), ("split", split)):
        if self_prompts is not None and value is not None:
            raise ValueError(f"--{name} is of a data set, and --self-prompts has none: leave it out")
    if self_prompts is not None and server:
        raise ValueError(
            "--self-prompts needs --target, a target that is loaded here: a server only answers. To have it answer them, write "
            "prompts here with a small --max-tokens, then pass that file as the data set with --server"
        )


def check_writer(
    target: str | None, drafter: str | None, server: str | None, model: str | None, shard: str | None
) -> None:
    """Raise a `ValueError` unless it is clear who writes, and which part."""
    if bool(target) == bool(server):
        raise ValueError("expected who writes the answers, either --target or --server: pass one of them")
    if server and not model:
        raise ValueError("--server needs --model, the target's name on that server")
    if server and drafter:
        raise ValueError("--drafter is for a target that is loaded here: a server has its own, so leave it out")
    if shard is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("torchrun or accelerate launch says which shard is this process's: leave --shard out")


def device_of_this_process(device: str) -> str:
    """Of several processes on a machine each has an accelerator of its own, unless a device is asked for."""
    if device != "auto" or "LOCAL_RANK" not in os.environ or not torch.accelerator.is_available():
        return device
    return f"{torch.accelerator.current_accelerator().type}:{os.environ['LOCAL_RANK']}"
