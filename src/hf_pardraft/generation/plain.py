"""What plain `generate` writes of a call with a drafter: all of it, or the rest of it from some round on."""

from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from ..models.base import ParallelDrafter
from .inference_mode import mode_for
from .packing.fast_attention import fast_attention
from .packing.fused_norms import fused_norms
from .packing.packed_layers import packed_layers
from .settings import returns_states, settings_of_call, wants_compiled
from .stats import DecodeStats
from .target_side.prompt import first_inputs


def write_plain(
    target: PreTrainedModel,
    drafter: ParallelDrafter,
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    is_brief: bool = False,
    **arguments: Any,
) -> Any:
    """Continue `input_ids (batch, length)` by plain `generate`; returns what that returns.

    Args:
        target, input_ids, generation_config: as `generate` prepared them.
        drafter: drafts nothing; its `last_stats` say so.
        is_brief: whether so few tokens are to be written that faster steps don't pay: a call looks over all packed weights, to
            begin with.
        **arguments: the others that `generate` prepared.
    """
    wanted = settings_of_call(drafter, generation_config).pack_weights
    drafter.last_stats = stats = DecodeStats()
    with ExitStack() as ways:
        # What plain `generate` compiles, it would compile anew for ours.
        if not (is_brief or wants_compiled(generation_config)):
            ways.enter_context(packed_layers(target, wanted=wanted))
            ways.enter_context(fused_norms(target))
            ways.enter_context(fast_attention(target))
        result = _continued(target, input_ids, generation_config, **arguments)
    add_plain_rounds(stats, new_ids_of(result, input_ids.shape[1]), generation_config._eos_token_tensor)
    return result


def is_compiled_alike(target: PreTrainedModel, generation_config: GenerationConfig) -> bool:
    """Whether plain `generate` compiles its steps where our rounds are compiled: by itself it does so on accelerators alone."""
    compile_config = generation_config.compile_config
    compiles_everywhere = compile_config is not None and compile_config._compile_all_devices
    return not wants_compiled(generation_config) or target.device.type != "cpu" or bool(compiles_everywhere)


class PlainRest:
    """Plain `generate`, for the rest of a call.

    Args:
        target: the model whose text is written.
        generation_config, model_kwargs: as `generate` prepared them.
        **arguments: the others that `generate` prepared.

    Attributes:
        is_possible: whether the rest of such a call can be written like a later turn of a chat.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        **arguments: Any,
    ) -> None:
        self.target, self.generation_config, self.model_kwargs = target, generation_config, model_kwargs
        self.arguments = arguments
        self.end_tokens = generation_config._eos_token_tensor
        # States come in one piece for each forward, and an image is not read twice. A mask that hides nothing is
        # left out, and its length noted; of a target that takes none plain `generate` can't tell what it has read.
        has_mask = model_kwargs.get("attention_mask") is not None
        self.is_possible = (
            not returns_states(generation_config)
            and not first_inputs(model_kwargs)
            and (has_mask or "_mask_length" in vars(generation_config))
            # A caller's own may ask for what a forward has put out.
            and "_update_model_kwargs_for_generation" not in vars(target)
        )

    def write(self, text: torch.LongTensor, num_new: int, stats: DecodeStats) -> Any:
        """Continue the text; returns what plain `generate` returns.

        Args:
            text: `(batch, columns)`, padding included; the caller's cache has the entries of all columns but the last.
            num_new: how many of the columns are new since the prompt.
            stats: of the call; the new rounds are added.
        """
        self.generation_config._mask_length = text.shape[1]
        # It changes the dictionary that it is given.
        model_kwargs = self.target._update_model_kwargs_for_generation(
            ModelOutput(), dict(self.model_kwargs), num_new_tokens=num_new
        )
        result = _continued(self.target, text, self.generation_config, **self.arguments, **model_kwargs)
        add_plain_rounds(stats, new_ids_of(result, text.shape[1]), self.end_tokens)
        return result


def _continued(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
    **arguments: Any,
) -> Any:
    """What plain `generate` returns for a text `(batch, length)`; a streamer is shown tensors as ever."""
    seen = generation_config, logits_processor, stopping_criteria
    # What is compiled is compiled for a mode.
    is_as_ever = streamer is not None or wants_compiled(generation_config)
    with nullcontext() if is_as_ever else mode_for(target, *seen, arguments["past_key_values"]):
        result = target._sample(
            input_ids,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            **arguments,
        )
    return result.clone() if isinstance(result, torch.Tensor) and result.is_inference() else result


def new_ids_of(result: Any, length: int) -> torch.LongTensor:
    """What `generate` appended to a text of `length` columns, `(batch, new)`."""
    return (result if isinstance(result, torch.Tensor) else result.sequences)[:, length:]


def add_plain_rounds(stats: DecodeStats, new_ids: torch.LongTensor, end_tokens: torch.LongTensor | None) -> None:
    """Note rounds that commit one token each.

    Args:
        stats: of the call.
        new_ids: `(batch, new)`; after the token that ends its text, an item is padded.
        end_tokens: `(ends,)`.
    """
    ends = set() if end_tokens is None else {*end_tokens.tolist()}
    # An item's last token is the one that ends it.
    lengths = [
        next((length for length, token in enumerate(item, 1) if token in ends), len(item)) for item in new_ids.tolist()
    ]
    for step in range(new_ids.shape[1]):
        count = sum(length > step for length in lengths)
        stats.add_round([0] * count, [0] * count, [1] * count)
