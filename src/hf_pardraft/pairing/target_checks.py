"""What a target takes, and what of it a drafter can read: how many hidden states, how wide they are, and the checks on both."""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from ..models.base import ParallelDrafter, text_fact
from ..models.target_bound import TargetBoundDrafter

READS_TOKENS_ONLY = (
    "use a drafter that reads token ids only (PARD, or PARD-2 with use_target_features=False), or another target"
)


def input_dtype(module: nn.Module) -> torch.dtype | None:
    """In what precision a part of a target takes its input; `None`, any, where its weights are bytes: quantised."""
    # `DraftState`, which travels with drafters, finds a head's in the same way.
    return next((weight.dtype for weight in module.parameters() if weight.dtype.itemsize > 1), None)


def has_plain_weights(model: nn.Module) -> bool:
    """Whether the weights of a model are what it computes with: none is quantised, or spread over devices."""
    return all(type(weight) is nn.Parameter and weight.dtype.itemsize > 1 for weight in model.parameters())


def takes_positions(target: PreTrainedModel) -> bool:
    """Whether a target's forward names `position_ids`, or one that it overrides, which somebody's wrapper may not."""
    forwards = [vars(each)["forward"] for each in type(target).__mro__ if "forward" in vars(each)]
    own = vars(target).get("forward")
    return any(map(_names_positions, forwards)) or (own is not None and _names_positions.__wrapped__(own))


@functools.lru_cache(maxsize=256)
def _names_positions(forward: Callable) -> bool:
    """Whether a class's forward names `position_ids`. Each call asks, and a signature is slow to make."""
    return "position_ids" in inspect.signature(forward).parameters


def state_recorder(target: PreTrainedModel) -> PreTrainedModel | None:
    """The part of `target` that can put out selected hidden states of its text decoder; `None` if there is none."""
    config = target.config.get_text_config(decoder=True)
    parts = (module for module in target.modules() if isinstance(module, PreTrainedModel) and module.config is config)
    return next((part for part in parts if "hidden_states" in (part._can_record_outputs or {})), None)


def num_layer_outputs(target: PreTrainedModel) -> int:
    """How many layers' outputs are among `target`'s `hidden_states`, which are one more.

    Not always `num_hidden_layers`: of LongCat-Flash, that counts the halves of its layers, since each has two caches.

    Raises:
        ValueError: if the configuration doesn't say.
    """
    recorder = state_recorder(target)
    recorded = None if recorder is None else recorder._can_record_outputs["hidden_states"]
    name = recorded.num_hidden_layers_key if isinstance(recorded, OutputRecorder) else "num_hidden_layers"
    return text_fact(target, name)


def check_can_be_tapped(kind: str, target: PreTrainedModel) -> None:
    """Raise a `ValueError` if `target` has no hidden states of one vector per token and layer to select from.

    Args:
        kind: the name of the drafter's class.
        target: the model to draft for.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"drafters work with decoder-only targets, and {type(target).__name__} is an encoder-decoder: use another target"
        )
    recorder = state_recorder(target)
    if recorder is None:
        raise ValueError(
            f"{type(target).__name__} can't select hidden states (output_hidden_states=[...]), which a {kind} reads: "
            f"{READS_TOKENS_ONLY}"
        )
    num_streams = getattr(recorder.config, "altup_num_inputs", 1)
    if num_streams > 1:
        raise ValueError(
            f"{type(target).__name__} has {num_streams} hidden states per token and layer, and a {kind} reads one: "
            f"{READS_TOKENS_ONLY}"
        )


def check_readable(drafter: ParallelDrafter, target: PreTrainedModel, taps: list[int]) -> None:
    """Raise a `ValueError` if `target` can't give what a drafter reads of it: the taps, and what it borrows."""
    kind = type(drafter).__name__
    if isinstance(drafter, TargetBoundDrafter):
        check_borrowed(kind, target, drafter.has_own_head)
    check_taps(kind, target, taps)


def check_taps(kind: str, target: PreTrainedModel, taps: list[int]) -> None:
    """Raise a `ValueError` if `target` can't give the hidden states that a drafter is to read.

    A negative index counts from the end, where -1 says by itself that it is taken after the final norm.

    Args:
        kind: the name of the drafter's class.
        target: the model to draft for.
        taps: indices into its `hidden_states`.
    """
    if not taps:
        return
    check_can_be_tapped(kind, target)
    num_layers = num_layer_outputs(target)
    wrong = [tap for tap in taps if not -num_layers - 1 <= tap <= num_layers]
    if wrong:
        raise ValueError(
            f"the drafter taps hidden states {taps}, but a target of {num_layers} layers has indices 0 to {num_layers - 1}, or "
            f"-1 to {-num_layers - 1} from the end (of {wrong} none exists): it was made for a deeper target: use that one, a "
            "drafter made for this one, or other indices"
        )
    if num_layers in taps:
        raise ValueError(
            f"the drafter taps hidden state {num_layers} (layer {num_layers - 1}) of a target of {num_layers} layers. That "
            "entry is taken after the final norm, so it is not the layer's output: tap layers 0 to "
            f"{num_layers - 2} only"
        )


@torch.no_grad()
def check_tapped_states(kind: str, target: PreTrainedModel, taps: list[int]) -> None:
    """Read one token, and raise a `ValueError` unless each tap is a vector of the target's hidden size.

    What a configuration says of its layers is not all that there is: some families keep several streams in a layer's output
    (DeepSeek-V4, Qwen4-Exp), and others leave layers out where there is nothing to attend to (Mllama without an image). A
    fresh drafter is made once, so one forward is a small price. Nothing is read of a target without weights.

    Args:
        kind: the name of the drafter's class.
        target: the model to draft for.
        taps: indices into its `hidden_states`.
    """
    if not taps or any(weight.is_meta for weight in target.parameters()):
        return
    width, num_layers = text_fact(target, "hidden_size"), num_layer_outputs(target)
    token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    states = target(input_ids=token, output_hidden_states=taps, use_cache=False).hidden_states
    if len(states) != num_layers + 1:
        what = f"{len(states) - 1} of {num_layers} layers' outputs"
    else:
        wrong = [tuple(states[tap].shape) for tap in taps if states[tap].shape != (1, 1, width)]
        what = f"states of shape {wrong[0]}" if wrong else None
    if what is not None:
        raise ValueError(
            f"a {kind} reads one hidden state of size {width} per token from each layer that it taps, and "
            f"{type(target).__name__} has, for one token, {what}: {READS_TOKENS_ONLY}"
        )


def check_borrowed(kind: str, target: PreTrainedModel, has_own_head: bool) -> None:
    """Raise a `ValueError` unless a drafter as wide as `target`'s layers can use its embedding, and its head.

    Args:
        kind: the name of the drafter's class.
        target: the model to draft for.
        has_own_head: whether the drafter does without the target's.
    """
    width = text_fact(target, "hidden_size")
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    of_embedding = embedding.embedding_dim if isinstance(embedding, nn.Embedding) else width
    check_width(kind, target, "embedding", of_embedding, width)
    if has_own_head:
        return
    if head is None:
        raise ValueError(
            f"a {kind} borrows the target's head, and {type(target).__name__} has none (get_output_embeddings is None): "
            "load the target as a causal language model"
        )
    of_head = head.in_features if isinstance(head, nn.Linear) else width
    check_width(kind, target, "head", of_head, width)


def check_width(kind: str, target: PreTrainedModel, part: str, found: int, width: int) -> None:
    """Raise a `ValueError` unless a part of `target` that a drafter borrows is as wide as the target's layers."""
    if found != width:
        raise ValueError(
            f"a {kind} borrows the target's {part}, which has to be as wide as the target's layers, and {type(target).__name__} "
            f"has one of {found} for layers of {width}: {READS_TOKENS_ONLY}"
        )
