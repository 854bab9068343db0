"""A language model with fewer of its own layers: what a PARD drafter can begin with where there is no small model."""

import copy
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

# One layer of so many stays, and no fewer than that in all.
KEPT_SHARE, FEWEST = 5, 2
LAYER = re.compile(r"^(.*\blayers\.)(\d+)(\..*)$")


def evenly_spaced_layers(num_layers: int, count: int) -> list[int]:
    """`count` of a model's layers, the first and the last among them, as evenly as can be.

    Raises:
        ValueError: if there are not so many.
    """
    if not 1 <= count <= num_layers:
        raise ValueError(f"expected from 1 to {num_layers} layers to keep, got {count}")
    if count == 1:
        return [0]
    return [round(place * (num_layers - 1) / (count - 1)) for place in range(count)]


def default_num_layers(num_layers: int) -> int:
    """How many layers a drafter keeps of a target: one in five."""
    return min(num_layers, max(FEWEST, num_layers // KEPT_SHARE))


def with_layers(config: dict[str, Any], layers: list[int]) -> dict[str, Any]:
    """The fields of a configuration with some of its layers: lists that have an entry for each keep those of the layers."""
    num_layers = config["num_hidden_layers"]
    picked = {
        name: [value[layer] for layer in layers]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == num_layers and name.startswith("layer")
    }
    return {**config, **picked, "num_hidden_layers": len(layers)}


def picked_weights(weights: dict[str, torch.Tensor], layers: list[int]) -> dict[str, torch.Tensor]:
    """Those of a model's weights that belong to none of its layers, or to one that is kept, under their new names."""
    places, found = {layer: place for place, layer in enumerate(layers)}, {}
    for name, weight in weights.items():
        match = LAYER.match(name)
        if match is None:
            found[name] = weight
        elif int(match[2]) in places:
            found[f"{match[1]}{places[int(match[2])]}{match[3]}"] = weight
    return found


def cut_down_copy(model: PreTrainedModel, count: int | None = None) -> tuple[PreTrainedModel, list[int]]:
    """A copy of a causal LM with some of its layers, embeddings and head unchanged.

    Args:
        model: a decoder whose layers are called `layers.N`.
        count: how many layers; by default one in five.

    Returns:
        The copy, and which layers it has.

    Raises:
        ValueError: if there are not so many layers.
    """
    num_layers = model.config.num_hidden_layers
    layers = evenly_spaced_layers(num_layers, default_num_layers(num_layers) if count is None else count)
    fields = with_layers(copy.deepcopy(model.config).to_dict(), layers)
    config = type(model.config).from_dict(fields)
    made = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    made.load_state_dict(picked_weights(model.state_dict(), layers))
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.to(model.device).eval(), layers
