"""What the command `pardraft regenerate` does; cli/app.py only reads its arguments."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from ..datagen.local_writer import LocalWriter
from ..datagen.prompt_writer import PromptSampling
from ..datagen.regenerate import Regeneration, Shard, check_output, regenerate
from ..datagen.rewriting import check_sampling
from ..datagen.self_prompts import SelfPrompting, write_dialogues
from ..datagen.server_writer import ServerWriter
from ..datagen.user_turns import UserTurns
from ..training.data.sources import load_data
from ..user_input.files import parse_json, quoted
from ..user_input.models import load_models, load_tokenizer
from ..user_input.options import checked_device, checked_dtype


@dataclass
class RegenerateRequest:
    """What `pardraft regenerate` is asked to do: who writes, how, and where to.

    Either `target` is loaded here, with `drafter` if there is one, or `server` has it under the name `model`. Prompts are those
    of `dataset`, or `self_prompts` many that the target invents.
    """

    dataset: str | None
    output: str
    self_prompts: int | None
    target: str | None
    drafter: str | None
    server: str | None
    model: str | None
    api_key_variable: str
    config: str | None
    split: str
    shard: str | None
    temperature: float
    top_p: float
    max_tokens: int
    prompt_temperature: float
    prompt_top_p: float
    prompt_max_tokens: int
    more_turns: float
    max_turns: int
    prompt_system: list[str]
    seed: int
    chat_template_kwargs: str | None
    batch_size: int
    concurrency: int
    retries: int
    dtype: str
    device: str
    trust_remote_code: bool = False


def regenerate_dataset(request: RegenerateRequest) -> Regeneration:
    """Rewrite the answers of a data set, or write dialogues, with a progress bar.

    Raises:
        OSError, ValueError: if the arguments contradict each other, or something can't be loaded or written.
    """
    check_writer(request)
    sampling = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "template_kwargs": parse_template_kwargs(request.chat_template_kwargs),
    }
    shard = Shard.of_this_process() if request.shard is None else Shard.parse(request.shard)
    # A model takes minutes to load, so all else is looked at before.
    check_output(request.output)
    if request.self_prompts is not None:
        return write_self_prompted(request, sampling, shard)
    rows = load_data(request.dataset, request.config, request.split)
    writer = server_writer(request, sampling) if request.server else local_writer(request, sampling)
    target_name = request.model if request.server else request.target
    return regenerate(rows, request.output, writer, target_name=target_name, shard=shard)


def write_self_prompted(request: RegenerateRequest, sampling: dict[str, Any], shard: Shard) -> SelfPrompting:
    """Dialogues whose prompts the target invents."""
    prompts = PromptSampling(
        request.prompt_temperature,
        request.prompt_top_p,
        request.prompt_max_tokens,
        request.more_turns,
        request.max_turns,
        tuple(request.prompt_system),
    )
    UserTurns(load_tokenizer(request.target, request.trust_remote_code), sampling["template_kwargs"])
    writer = local_writer(request, sampling)
    return write_dialogues(request.self_prompts, request.output, writer, request.target, prompts, shard)


def check_writer(request: RegenerateRequest) -> None:
    """Raise a `ValueError` unless it is clear what is written, who writes, and how."""
    check_sampling(request.temperature, request.top_p, request.max_tokens)
    checked_dtype(request.dtype)
    checked_device(request.device)
    if (request.dataset is None) == (request.self_prompts is None):
        raise ValueError("expected where prompts come from, either a data set or --self-prompts: pass one of them")
    if request.self_prompts is not None and request.config is not None:
        raise ValueError("--config is of a data set, and --self-prompts has none: leave it out")
    if request.self_prompts is not None and request.server:
        raise ValueError(
            "--self-prompts needs --target, a target that is loaded here: a server only answers. To have it answer them, write "
            "prompts here with a small --max-tokens, then pass that file as the data set with --server"
        )
    if bool(request.target) == bool(request.server):
        raise ValueError("expected who writes the answers, either --target or --server: pass one of them")
    if request.server and not request.model:
        raise ValueError("--server needs --model, the target's name on that server")
    if request.server and request.drafter:
        raise ValueError("--drafter is for a target that is loaded here: a server has its own, so leave it out")
    if request.shard is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("torchrun or accelerate launch says which shard is this process's: leave --shard out")


def parse_template_kwargs(text: str | None) -> dict[str, Any]:
    """The settings of the chat template, from JSON.

    Raises:
        ValueError: if it is no JSON object.
    """
    parsed = parse_json(text, f"--chat-template-kwargs {quoted(text)}") if text else {}
    if not isinstance(parsed, dict):
        raise ValueError(f"expected --chat-template-kwargs as a JSON object, got {quoted(text)}")
    return parsed


def local_writer(request: RegenerateRequest, sampling: dict[str, Any]) -> LocalWriter:
    device = device_of_this_process(request.device)
    tokenizer, target, drafter = load_models(
        request.target, request.drafter, request.dtype, device, request.trust_remote_code
    )
    return LocalWriter(target, tokenizer, drafter, batch_size=request.batch_size, **sampling)


def device_of_this_process(device: str) -> str:
    """Of several processes on a machine each has an accelerator of its own, unless a device is asked for."""
    if device != "auto" or "LOCAL_RANK" not in os.environ or not torch.accelerator.is_available():
        return device
    return f"{torch.accelerator.current_accelerator().type}:{os.environ['LOCAL_RANK']}"


def server_writer(request: RegenerateRequest, sampling: dict[str, Any]) -> ServerWriter:
    key = os.environ.get(request.api_key_variable)
    limits = {"concurrency": request.concurrency, "retries": request.retries}
    return ServerWriter(request.server, request.model, api_key=key, **limits, **sampling)


def describe_regeneration(result: Regeneration) -> dict[str, Any]:
    """What to tell about it."""
    facts = {
        "output": result.path,
        "rows": result.num_rows,
        "written before": result.num_before,
        "written now": result.num_written,
        "failed": len(result.failed),
    }
    if isinstance(result, SelfPrompting):
        facts["prompts sampled"] = result.num_prompts
        reasons = ", ".join(f"{count} {reason}" for reason, count in result.refused.most_common())
        facts["prompts not used"] = f"{result.refused.total()} ({reasons})" if reasons else 0
    if result.num_tokens:
        facts["tokens written now"] = result.num_tokens
        facts["tokens a second"] = round(result.num_tokens / result.seconds, 1)
    if result.failed:
        index, reason = next(iter(result.failed.items()))
        facts["first failure"] = f"row {index}: {reason}"
        facts["next"] = "run the same command again, and the rows that failed are tried again"
    return facts
