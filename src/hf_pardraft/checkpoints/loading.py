"""Loading a drafter on no one's word: files are checked first, weights matched by name, values looked at last."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..models.base import ParallelDrafter, hub_arguments
from ..models.configuration_pard import PardConfig, config_class_of
from ..models.modeling_dart import check_vocabulary_maps
from ..models.modeling_dflash import DFlashDrafter
from ..models.modeling_pard import PARD_DRAFTERS, VOCABULARY_FILE, PardDrafter
from .atomic_folders import finish_interrupted
from .checksums import check_checksums
from .config_checks import check_config_fields
from .files import check_generation_config, find_separate, find_weight_files, read_config_file
from .projection import (
    PROJECTION_FILES,
    find_projection,
    is_among_weights,
    load_projection,
    without_projection,
)
from .published import RENAMED_WEIGHTS, find_drafter_class
from .sources import located, with_resolved_revision
from .tensor_files import TensorFacts, describe_tensors, is_safetensors
from .vocabulary import vocabulary_in
from .weights import account_for_weights, check_finite, expected_weights, own_name

logger = logging.get_logger(__name__)


def load_drafter(model_class: type[ParallelDrafter], name_or_path, *model_args: Any, **kwargs: Any) -> Any:
    """See [`ParallelDrafter.from_pretrained`]: a drafter of any known layout, and in what state a kill has left its folder.

    Raises:
        OSError, ValueError: see there.
    """
    if getattr(model_class, "config_class", None) is None:
        raise ValueError(
            f"{model_class.__name__} is what all kinds of drafters have in common: load one of any kind by "
            "AutoDrafter.from_pretrained, or by the class of its kind"
        )
    if name_or_path is not None:
        finish_interrupted(name_or_path)
    if not issubclass(model_class, PardDrafter):
        return load_checked(model_class, name_or_path, *model_args, **kwargs)
    kwargs = located(name_or_path, kwargs)
    loaded = load_pard(model_class, name_or_path, *model_args, **kwargs)
    drafter = loaded[0] if isinstance(loaded, tuple) else loaded
    if name_or_path is not None and drafter.config.draft_vocab_size is not None:
        file = find_separate(name_or_path, [VOCABULARY_FILE], **hub_arguments(kwargs))
        if file is not None:
            vocabulary_in(file, drafter.config.vocab_size, drafter.config.draft_vocab_size)
        drafter.load_vocabulary(name_or_path, file)
    return loaded


def load_pard(model_class: type[PardDrafter], name_or_path, *model_args: Any, **kwargs: Any) -> Any:
    """[`load_checked`] of a PARD drafter; `PardDrafter` itself gives the class of the base architecture in its config.

    The projection of a PARD-2 drafter is looked for in `target_projection/model.safetensors` and, as published, in
    `warp_model.bin`, and among the other weights, where the authors' trainer leaves it. Without it the drafter is loaded as a
    PARD drafter, with a warning. In a repository whose root holds no drafter, the published subfolder `pard_model` is read.
    """
    source, config = hub_arguments(kwargs), kwargs.get("config")
    # Not PardConfig: code that came with a checkpoint may have been imported twice, and its classes with it.
    if isinstance(config, PreTrainedConfig):
        fields = config.to_dict()
    else:
        fields, _ = PardConfig.get_config_dict(config or name_or_path, **source)
    check_kind(model_class, fields, name_or_path)
    if model_class is PardDrafter:
        model_class = PARD_DRAFTERS[config_class_of(fields.get("model_type")).model_type]
    reads_target = fields.get("spd_type") == "pard2"
    projection = find_projection(name_or_path, **source) if reads_target else None
    has_bias = bool(fields.get("pard2_proj_bias"))
    if reads_target and projection is None and not is_among_weights(name_or_path, kwargs, has_bias):
        warnings.warn(
            f"{name_or_path} is a PARD-2 drafter without its projection (none of {', '.join(PROJECTION_FILES)} is there): it "
            "drafts without the target's hidden states, as a PARD drafter",
            UserWarning,
            # Of whoever called from_pretrained.
            stacklevel=5,
        )
        kwargs = without_projection(kwargs)
    loaded = load_checked(model_class, name_or_path, *model_args, **kwargs)
    if projection is not None:
        load_projection((loaded[0] if isinstance(loaded, tuple) else loaded).target_proj, projection)
    return loaded


def load_checked(model_class: type[ParallelDrafter], name_or_path, *model_args: Any, **kwargs: Any) -> Any:
    """[`ParallelDrafter.load_whole`], between checks before it and after it.

    Raises:
        OSError, ValueError: see [`ParallelDrafter.from_pretrained`].
    """
    return_info, given = kwargs.pop("output_loading_info", False), kwargs.get("generation_config")
    renamed = {**(kwargs.pop("key_mapping", None) or {}), **renamed_weights(model_class)}
    if kwargs.get("weights_only") is False:
        raise ValueError(
            "a pickle may hold a program, so drafters are loaded with weights_only=True only: leave it out"
        )
    # A state dict that the caller holds already is not read from files.
    if name_or_path is not None and kwargs.get("state_dict") is None:
        kwargs = with_resolved_revision(name_or_path, kwargs)
        config = load_config(model_class, name_or_path, kwargs)
        check_generation_config(name_or_path, **hub_arguments(kwargs))
        facts = describe_checkpoint(name_or_path, kwargs)
        found = reduced_head(model_class, config, {own_name(name, renamed): tensor for name, tensor in facts.items()})
        if isinstance(kwargs.get("config"), PreTrainedConfig):
            # A caller's own config stays as it is.
            kwargs = {**kwargs, "config": (config := copy.deepcopy(config))}
        else:
            kwargs = {**kwargs, **found}
        config.update(found)
        # Quantised weights are stored in shapes and dtypes of their own.
        if kwargs.get("quantization_config") is None and "quantization_config" not in config.to_dict():
            match_weights(model_class, config, facts, name_or_path, renamed)
    model, info = model_class.load_whole(
        name_or_path, *model_args, output_loading_info=True, key_mapping=renamed or None, **kwargs
    )
    if given is not None:
        # Transformers passes it over for what can't write text by itself.
        model.generation_config = GenerationConfig.from_dict(given.to_dict())
    # What was renamed is called by our names from now on, in saved files, too.
    model._weight_conversions = []
    check_finite(model, name_or_path)
    if "d2t" in model.state_dict():
        check_vocabulary_maps(model.d2t, model.t2d)
    if isinstance(model, DFlashDrafter) and model.config.own_head:
        # Rows of the target's head. What is loaded is a parameter like any other.
        model.lm_head.requires_grad_(False)
    note_own_head(model)
    return (model, info) if return_info else model


def reduced_head(
    model_class: type[ParallelDrafter], config: PreTrainedConfig, facts: dict[str, TensorFacts]
) -> dict[str, Any]:
    """What the files of a DFlash or DFlare drafter say of its draft vocabulary and head, and its config may not.

    Args:
        model_class, config: of any drafter.
        facts: what the weight files hold, by our names.

    Raises:
        ValueError: if the map of a draft vocabulary is no list of tokens, or the head has rows of neither it nor all tokens.
    """
    if not issubclass(model_class, DFlashDrafter):
        return {}
    size = config.draft_vocab_size or (num_mapped(facts["d2t"]) if "d2t" in facts else config.vocab_size)
    if size == config.vocab_size:
        # Speculators' configs say it of a whole vocabulary, too.
        return {"draft_vocab_size": None}
    head = facts.get("lm_head.weight")
    if head is not None and head.shape[:1] not in ((size,), (config.vocab_size,)):
        raise ValueError(
            f"lm_head.weight in {head.path} has shape {head.shape}, expected rows of the {size} tokens of the draft vocabulary, "
            f"or of all {config.vocab_size}: get the checkpoint again, or mend draft_vocab_size in config.json"
        )
    return {"draft_vocab_size": size, "own_head": config.own_head or (head is not None and head.shape[:1] == (size,))}


def num_mapped(d2t: TensorFacts) -> int:
    """How many tokens a draft vocabulary has, by its map; a `ValueError` if that is no list of one or more."""
    if len(d2t.shape) != 1 or d2t.shape[0] == 0:
        raise ValueError(
            f"d2t in {d2t.path} has shape {d2t.shape}, expected a place for each token of the draft vocabulary, one or more: get "
            "the checkpoint again"
        )
    return d2t.shape[0]


def renamed_weights(model_class: type[ParallelDrafter]) -> dict[str, str]:
    """Patterns of the names that published checkpoints have for weights of a drafter, and what takes their place."""
    return RENAMED_WEIGHTS.get(model_class.config_class.drafter_kind, {})


def note_own_head(model: PreTrainedModel) -> None:
    """Let the config of a model say that its lm_head is its own, where the files held one that is not its embedding.

    Transformers keeps such a head, and others would pass over it because the config calls it tied.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and embedding is not None and not model.all_tied_weights_keys:
        model.config.tie_word_embeddings = False


def load_config(model_class: type[PreTrainedModel], name_or_path, kwargs: dict[str, Any]) -> PreTrainedConfig:
    """The config that `from_pretrained` will use, checked field by field where it comes from a file.

    Raises:
        ValueError: if a field is absurd, or no such drafter can be built of it.
    """
    config, source = kwargs.get("config"), hub_arguments(kwargs)
    if isinstance(config, PreTrainedConfig):
        return config
    place = config or name_or_path
    fields = read_config_file(place, **source)
    check_kind(model_class, fields, place)
    check_config_fields(fields, f"the config of {place}")
    names = {field.name for field in dataclass_fields(model_class.config_class)} - {"dtype"}
    overrides = {name: value for name, value in kwargs.items() if name in names}
    with explaining(model_class, place):
        config = model_class.config_class.from_pretrained(place, **source, **overrides)
    # What was not given has its default now, and may not go with what was.
    check_config_fields(config.to_dict(), f"the config of {place}, with defaults where it says nothing,")
    return config


def check_kind(model_class: type[PreTrainedModel], fields: dict[str, Any], place: Any) -> None:
    """Raise a `ValueError` if a config is that of another kind of drafter than a class loads."""
    found = find_drafter_class(fields)
    if found is not None and not (issubclass(model_class, found) or issubclass(found, model_class)):
        raise ValueError(
            f"{place} holds a {found.__name__}, and {model_class.__name__} was to load it: use {found.__name__} or AutoDrafter"
        )


@contextmanager
def explaining(model_class: type[PreTrainedModel], place) -> Iterator[None]:
    """Say whose config it is that nothing can be built of; transformers' own message may not."""
    try:
        yield
    except (OSError, ValueError):
        raise
    # A foreign config may be wrong in any way (an unknown activation, a rope without its factor), and nothing is lost yet.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"no {model_class.__name__} can be built of the config of {place} ({reason}): mend config.json"
        ) from error


def describe_checkpoint(name_or_path, kwargs: dict[str, Any]) -> dict[str, TensorFacts]:
    """What the weight files hold, after their checksums were compared, if they have any.

    Raises:
        OSError, ValueError: see [`find_weight_files`], [`describe_tensors`] and [`check_checksums`].
    """
    paths = find_weight_files(name_or_path, kwargs)
    facts = describe_tensors(paths)
    for path in filter(is_safetensors, paths):
        check_checksums(path)
    return facts


def match_weights(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    facts: dict[str, TensorFacts],
    name_or_path,
    renamed: dict[str, str] | None = None,
) -> dict[str, str]:
    """The names that a drafter's weights have in the files, see [`account_for_weights`]; says which weights are not read."""
    renamed = renamed_weights(model_class) if renamed is None else renamed
    if config.num_hidden_layers > len(facts):
        # Thousands of layers take minutes to build, even without memory.
        raise model_class.misfit(
            name_or_path, f"{config.num_hidden_layers} layers, and the files hold {len(facts)} weights"
        )
    with explaining(model_class, name_or_path):
        expected, optional = expected_weights(lambda: model_class(config))
    try:
        sources = account_for_weights(facts, expected, optional, renamed, model_class.ignored_weights)
    except ValueError as error:
        raise model_class.misfit(name_or_path, str(error)) from error
    unread = sorted(facts.keys() - sources.values())
    if unread:
        logger.info(f"{name_or_path} holds weights that a {model_class.__name__} does not read: {', '.join(unread)}")
    return sources
