"""How a fresh drafter starts: about as sure of every token as of any other, whatever its target's head is like.

A drafter's last norm gives hidden states of a length that its target's head was not made for, in a direction that means nothing
yet, and so logits that lie nats apart. The residual stream of a block drafter begins with the mask's embedding, besides: as long
as the layers add little to it, a tied head finds in it the mask, and all the tokens that the target has never seen, whose
embeddings are much alike. On stories260K, a tied target of 512 tokens, that made a first loss of 30.2 where a blind guess costs
ln 512 = 6.2. Layers whose weights fit their width, and a last norm that is scaled to the head, start where the guess is.
"""

import math

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.base import ParallelDrafter
from ..models.inputs import DraftInputs, input_device

# What the unlikeliest token may cost at first, in nats, above the ln V of a blind guess. The mean is far nearer to it: 6.5 for
# the 6.2 of stories260K. A norm that is smaller still has a longer way to go in training.
MOST_EXCESS = 2.0
# Of the text after which the scale is found.
NUM_TOKENS = 16
HALVINGS = 20


@torch.no_grad()
def start_as_a_blind_guess(drafter: ParallelDrafter, last_norm: nn.Module, target: PreTrainedModel) -> None:
    """Scale a fresh drafter's last norm so that no token costs more than ln V + [`MOST_EXCESS`] nats.

    Nothing is changed where the target's embedding or head can't be read (on the meta device, offloaded).

    Args:
        drafter: fresh, its last norm all ones.
        last_norm: an RMSNorm of the drafter, with nothing but a linear map after it.
        target: that the drafter is for.
    """
    parts = (drafter, target.get_input_embeddings(), target.get_output_embeddings())
    if any(part is None or any(weight.is_meta for weight in part.parameters()) for part in parts):
        return
    last_norm.weight.fill_(blind_scale(first_logits(drafter, target)))


def first_logits(drafter: ParallelDrafter, target: PreTrainedModel) -> torch.Tensor:
    """What the drafter says, `(depth, vocab)`, after random tokens with random features, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    width = drafter.config.target_hidden_size * len(drafter.taps_for(target))
    ids = torch.randint(drafter.config.vocab_size, (1, NUM_TOKENS + 1), generator=generator)
    features = torch.randn(1, NUM_TOKENS, width, generator=generator)
    positions = torch.arange(NUM_TOKENS + 1)[None]
    context = DraftInputs(
        *(tensor.to(input_device(target)) for tensor in (ids, positions, features, positions[:, :-1]))
    )
    return drafter.draft(context, drafter.new_draft_state(target), drafter.max_draft_depth)[0]


def blind_scale(logits: torch.Tensor) -> float:
    """The largest factor, 1 at most, with which no token costs more than ln V + [`MOST_EXCESS`] nats.

    The cost of the unlikeliest token, log sum exp(c z) - c min z, is ln V at c = 0 and grows with c.

    Args:
        logits: `(positions, vocab)`, -inf for tokens that can't be drafted, which don't count.
    """
    logits = logits.float()
    can_be_drafted = logits != -torch.inf
    lowest = logits.masked_fill(~can_be_drafted, torch.inf).amin(dim=-1)
    blind = can_be_drafted.sum(dim=-1).log()

    def is_near(scale: float) -> bool:
        excess = (scale * logits).logsumexp(dim=-1) - scale * lowest - blind
        return math.isfinite(excess.sum()) and bool((excess <= MOST_EXCESS).all())

    if is_near(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_near(middle) else (low, middle)
    return low or 1.0
