"""Loading a drafter on no one's word: files are checked first, weights matched by name, values looked at last."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging
from transformers.utils.hub import resolve_revision

from .checkpoint_files import (
    TensorFacts,
    check_generation_config,
    check_place,
    describe_tensors,
    find_weight_files,
    is_safetensors,
    read_config_file,
)
from .checkpoint_weights import account_for_weights, check_finite, expected_weights
from .checksums import check_checksums
from .config_checks import check_config_fields

logger = logging.get_logger(__name__)

# Arguments of `from_pretrained` that say where the files are.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
RESOLVING_ARGUMENTS = ("cache_dir", "local_files_only", "token", "revision")


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of `from_pretrained`'s arguments that say where a file comes from."""
    return {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}


def load_checked(
    model_class: type[PreTrainedModel], load: Callable, name_or_path, *model_args: Any, **kwargs: Any
) -> Any:
    """`load(name_or_path, ...)`, the `from_pretrained` of transformers, between checks before it and after it.

    Args:
        model_class: the drafter class, which says what its weights are called elsewhere and which others a checkpoint holds.
        load: what loads it, with `key_mapping` and `output_loading_info`.

    Raises:
        OSError, ValueError: see [`ParallelDrafter.from_pretrained`].
    """
    return_info = kwargs.pop("output_loading_info", False)
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
        # Quantised weights are stored in shapes and dtypes of their own.
        if kwargs.get("quantization_config") is None and "quantization_config" not in config.to_dict():
            match_weights(model_class, config, facts, name_or_path)
    model, info = load(
        name_or_path, *model_args, output_loading_info=True, key_mapping=model_class.renamed_weights or None, **kwargs
    )
    # What was renamed is called by our names from now on, in saved files, too.
    model._weight_conversions = []
    wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys") if info[kind]}
    if wrong:
        found = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(names)}" for kind, names in wrong.items())
        raise misfit(model_class, name_or_path, found)
    check_finite(model, name_or_path)
    note_own_head(model)
    return (model, info) if return_info else model


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
    check_config_fields(read_config_file(place, **source), f"the config of {place}")
    names = {field.name for field in dataclass_fields(model_class.config_class)} - {"dtype"}
    overrides = {name: value for name, value in kwargs.items() if name in names}
    with explaining(model_class, place):
        config = model_class.config_class.from_pretrained(place, **source, **overrides)
    # What was not given has its default now, and may not go with what was.
    check_config_fields(config.to_dict(), f"the config of {place}, with defaults where it says nothing,")
    return config


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


def with_resolved_revision(name_or_path, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` under which all files come from one commit, whatever is pushed meanwhile.

    Raises:
        OSError: if there is no such folder, and no repository could have this name.
    """
    if name_or_path is not None:
        check_place(name_or_path)
    source = {name: value for name, value in hub_arguments(kwargs).items() if name in RESOLVING_ARGUMENTS}
    revision = resolve_revision(name_or_path, **source)
    return kwargs if revision is None else {**kwargs, "revision": revision}


def describe_checkpoint(name_or_path, kwargs: dict[str, Any]) -> dict[str, TensorFacts]:
    """What the weight files hold, after their checksums were compared, if they have any.

    Raises:
        OSError, ValueError: see [`find_weight_files`], [`describe_tensors`] and [`check_checksums`].
    """
    choice = {name: kwargs[name] for name in ("use_safetensors", "variant") if name in kwargs}
    paths = find_weight_files(name_or_path, **choice, **hub_arguments(kwargs))
    facts = describe_tensors(paths)
    for path in filter(is_safetensors, paths):
        check_checksums(path)
    return facts


def match_weights(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, facts: dict[str, TensorFacts], name_or_path
) -> dict[str, str]:
    """The names that a drafter's weights have in the files, see [`account_for_weights`]; says which weights are not read."""
    if config.num_hidden_layers > len(facts):
        # Thousands of layers take minutes to build, even without memory.
        raise misfit(
            model_class, name_or_path, f"{config.num_hidden_layers} layers, and the files hold {len(facts)} weights"
        )
    with explaining(model_class, name_or_path):
        expected, optional = expected_weights(lambda: model_class(config))
    try:
        sources = account_for_weights(
            facts, expected, optional, model_class.renamed_weights, model_class.ignored_weights
        )
    except ValueError as error:
        raise misfit(model_class, name_or_path, str(error)) from error
    unread = sorted(facts.keys() - sources.values())
    if unread:
        logger.info(f"{name_or_path} holds weights that a {model_class.__name__} does not read: {', '.join(unread)}")
    return sources


def misfit(model_class: type[PreTrainedModel], name_or_path, found: str) -> ValueError:
    return ValueError(
        f"the weights in {name_or_path} do not fit a {model_class.__name__} ({found}). No weight is left random: check that the "
        "folder holds this kind of drafter and that config.json describes these weights"
    )
