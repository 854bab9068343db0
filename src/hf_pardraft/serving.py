"""What Transformers' own server loads: the target, which writes with a drafter from then on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from fastapi import HTTPException
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.cli.serving import model_manager
from transformers.cli.serving.utils import split_model_id
from transformers.generation import GenerationMode
from transformers.utils import logging

from .models.base import ParallelDrafter
from .user_input.models import load_drafter, naming
from .user_input.options import checked_device, checked_dtype

logger = logging.get_logger(__name__)

# With prompt lookup alone, a config speaks of assisted generation; beside a drafter it is a branch of the tree.
DRAFTED_MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION}

# Caches that forget no rejected token.
UNDRAFTED_CACHES = {"quantized", "paged"}


@contextmanager
def drafting_with(drafter: str) -> Iterator[None]:
    """Within, `transformers serve MODEL` loads a drafter, too: a folder or a Hub repository."""
    plain = model_manager.ModelManager
    model_manager.ModelManager = partial(DraftingModelManager, drafter)
    try:
        yield
    finally:
        model_manager.ModelManager = plain


class DraftingModelManager(model_manager.ModelManager):
    """Transformers' own, with a drafter for the model that the server is for.

    Args:
        drafter: a folder or a Hub repository.
        **settings: those of Transformers' own.

    Raises:
        OSError, ValueError: if one of the two can't be loaded, or the drafter can't draft for the target.
    """

    def __init__(self, drafter: str, **settings: Any) -> None:
        if settings["continuous_batching"]:
            raise ValueError(
                "continuous batching works without a drafter, got --drafter and --continuous-batching: leave the latter out, or "
                "call transformers serve"
            )
        checked_dtype(settings["dtype"])
        # A number names an accelerator.
        if not settings["device"].isdigit():
            checked_device(settings["device"])
        self.drafter_name = drafter
        self.drafter: ParallelDrafter | None = None
        super().__init__(**settings)

    def load_model_and_processor(
        self, model_id_and_revision: str, *args: Any, gguf_file: str | None = None, **kwargs: Any
    ) -> tuple[PreTrainedModel, ProcessorMixin | PreTrainedTokenizerBase]:
        """As Transformers' own; the target drafts then. Others are loaded as ever: one may be there to transcribe speech."""
        load = partial(super().load_model_and_processor, model_id_and_revision, *args, gguf_file=gguf_file, **kwargs)
        name, target_file = split_model_id(self.force_model)
        if (model_id_and_revision, gguf_file) != (self.process_model_name(name), target_file):
            return load()
        # The smaller one first: what is wrong with it is known sooner.
        if self.drafter is None:
            self.drafter = load_drafter(self.drafter_name, dtype=self.dtype, device_map=self.device)
        with naming(self.force_model):
            model, processor = load()
        # It is another model after a POST to /reset.
        if "generate" not in vars(model):
            check_by_writing(model, self.drafter, processor)
            model.generate = with_drafter(model, self.drafter)
        return model, processor


def check_by_writing(
    target: PreTrainedModel, drafter: ParallelDrafter, processor: ProcessorMixin | PreTrainedTokenizerBase
) -> None:
    """Raise a `ValueError` if they don't fit, and warn of what the drafter was not trained for, by writing two tokens.

    Args:
        target, drafter: the two models.
        processor: the target's, or its tokenizer.
    """
    # Ends as the prompts of the drafter's training, so that this one is nothing to warn of.
    end_of_prompt = (drafter.config.chat_format or {}).get("prompt_end_ids")
    prompt = torch.tensor([end_of_prompt or [0]], device=target.device)
    config = GenerationConfig(max_new_tokens=2, do_sample=False, num_beams=1)
    given = {"attention_mask": torch.ones_like(prompt), "tokenizer": processor}
    target.generate(prompt, generation_config=config, assistant_model=drafter, **given)


def with_drafter(target: PreTrainedModel, drafter: ParallelDrafter) -> Callable[..., Any]:
    """`target.generate`, with a drafter in each call that can have one.

    What is wrong with a request is its client's business: as Transformers' own routes do, it is answered by status 400.
    """
    plain = target.generate

    @wraps(plain)
    def generate(*args: Any, generation_config: GenerationConfig | None = None, **kwargs: Any) -> Any:
        config = target.generation_config if generation_config is None else generation_config
        obstacle = obstacle_of(config)
        if obstacle is not None:
            logger.warning_once(f"Requests with {obstacle} can have no drafter, and are written without.")
            return plain(*args, generation_config=generation_config, **kwargs)
        try:
            return plain(*args, generation_config=generation_config, assistant_model=drafter, **kwargs)
        # An n-gram model that is named and not there is an OSError.
        except (OSError, ValueError) as error:
            raise HTTPException(status_code=400, detail=str(error)) from error

    return generate


def obstacle_of(config: GenerationConfig) -> str | None:
    """What of a request keeps it from being drafted for; `None` if nothing does."""
    mode, cache = config.get_generation_mode(), config.cache_implementation
    if mode not in DRAFTED_MODES:
        return mode.value
    if config.use_cache is False:
        return "use_cache=False"
    return f"cache_implementation={cache!r}" if cache in UNDRAFTED_CACHES else None
