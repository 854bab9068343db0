"""What an objective is worth for logits that are all there: through the scorer and the sums that a trainer takes."""

import torch
from torch import nn

from hf_pardraft.training.losses.objectives import (
    OBJECTIVES,
    BlockScores,
    ObjectiveSettings,
    objective_sums,
    total_loss,
)
from hf_pardraft.training.losses.scoring import PositionScorer


def objective_value(
    name, logits, labels, valid, target_logits=None, confidences=None, temperature=1.0, elsewhere=0.0, **settings
) -> torch.Tensor:
    """The objective over blocks, a reward as what it is (not subtracted).

    Args:
        logits, target_logits: `(blocks, positions, vocab)`.
        labels, valid, confidences: `(blocks, positions)`; of streak, the labels are the continuations.
        elsewhere: what stands at positions that are not valid, in place of a score.
        settings: of [`ObjectiveSettings`].
    """
    scorer = PositionScorer(
        labels[valid],
        continuations=labels[valid],
        target_logits=None if target_logits is None else lambda chunk: target_logits[valid][chunk],
        temperature=temperature,
    )
    scored = scorer(nn.Identity(), logits[valid])
    is_right = torch.zeros_like(valid).index_put((valid,), scored.pop("is_right"))
    grids = {key: values.new_full(valid.shape, elsewhere).index_put((valid,), values) for key, values in scored.items()}
    scores = BlockScores(valid, valid, valid, is_right, confidences=confidences, continued=valid, **grids)
    sums = objective_sums({name: 1.0}, scores, ObjectiveSettings(**settings))
    return OBJECTIVES[name].sign * total_loss({name: 1.0}, sums)
