"""Which hidden states of a target a checkpoint means: the published conventions, and how they turn into each other.

A target of L layers gives a tuple of L + 1 `hidden_states`: the embeddings at index 0, then the output of layer i at index
i + 1, except that the last entry is taken after the final norm. DFlash and DFlare configs name layers, speculators' configs
name entries of the tuple, and so do DART and PARD-2 (negative ones count from its end).
"""

FIRST_LAYER_OUTPUT = 1


def layer_ids_to_hidden_state_indices(layer_ids: list[int]) -> list[int]:
    """Turn 0-based layer numbers ("the output of layer i") into indices of the target's `hidden_states` tuple."""
    return [layer_id + FIRST_LAYER_OUTPUT for layer_id in layer_ids]


def hidden_state_indices_to_layer_ids(indices: list[int]) -> list[int]:
    """Turn indices of the `hidden_states` tuple into the numbers of the layers whose outputs they are.

    Raises:
        ValueError: for an index that is no layer's output (0 holds the embeddings).
    """
    if any(index < FIRST_LAYER_OUTPUT for index in indices):
        raise ValueError(
            f"expected indices of hidden states that layers put out, {FIRST_LAYER_OUTPUT} or more, got {list(indices)}: index 0 "
            "holds the embeddings, which a DFlash drafter does not read"
        )
    return [index - FIRST_LAYER_OUTPUT for index in indices]
