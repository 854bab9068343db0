"""How the target itself goes on after prefixes of a text: what streak distillation learns from."""

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ...user_input.models import context_length, end_of_text_ids, without_settings_of_its_own
from ...widest_float import widest_float
from ..layouts.base import UNKNOWN


class DrawnByUniforms(LogitsProcessor):
    """Leaves one token, drawn from the softmax of the scores with numbers that are given beforehand.

    So a draw depends on its prefix alone, not on what else is in the batch, and not on any global state.

    Args:
        uniforms: `(prefixes, steps)`, in [0, 1).
    """

    def __init__(self, uniforms: torch.Tensor) -> None:
        self.uniforms = uniforms
        self.step = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        cumulative = scores.to(widest_float(scores.device)).softmax(dim=-1).cumsum(dim=-1)
        thresholds = self.uniforms[:, self.step].to(cumulative)[:, None] * cumulative[:, -1:]
        self.step += 1
        # Equal entries belong to tokens of probability 0, which must not be drawn.
        drawn = (cumulative <= thresholds).sum(dim=-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


@torch.no_grad()
def sample_continuations(
    target: PreTrainedModel, prefixes: list[torch.LongTensor], uniforms: torch.Tensor
) -> torch.LongTensor:
    """The tokens that the target writes after each prefix at temperature 1, up to and including its end of text.

    Args:
        prefixes: token ids, `(length,)` each.
        uniforms: `(prefixes, num_tokens)`, in [0, 1), where the randomness comes from.

    Returns:
        `(prefixes, num_tokens)`, `UNKNOWN` after an end of text, and where the target's context ends.
    """
    num_tokens, context = uniforms.shape[1], context_length(target.config)
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    rooms = torch.full_like(lengths, num_tokens) if context is None else (context - lengths).clamp(0, num_tokens)
    found = torch.full(uniforms.shape, UNKNOWN, dtype=torch.long, device=prefixes[0].device)
    # A batch goes as far as all of it can.
    for room in rooms[rooms > 0].unique().tolist():
        chosen = (rooms == room).nonzero()[:, 0].tolist()
        found[chosen, :room] = _written(target, [prefixes[index] for index in chosen], uniforms[chosen, :room])
    return found


def _written(target: PreTrainedModel, prefixes: list[torch.LongTensor], uniforms: torch.Tensor) -> torch.LongTensor:
    """[`sample_continuations`] of prefixes that leave room for all tokens."""
    num_tokens = uniforms.shape[1]
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    longest = int(lengths.max())
    ids = torch.stack([torch.nn.functional.pad(prefix, (longest - len(prefix), 0)) for prefix in prefixes])
    mask = torch.arange(longest) >= longest - lengths[:, None]
    ends = sorted(end_of_text_ids(target))
    settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=ends or None, pad_token_id=0)
    with without_settings_of_its_own(target):
        written = target.generate(
            ids,
            attention_mask=mask.to(ids.device).long(),
            generation_config=settings,
            logits_processor=LogitsProcessorList([DrawnByUniforms(uniforms)]),
        )[:, longest:]
    written = torch.nn.functional.pad(written, (0, num_tokens - written.shape[1]), value=UNKNOWN)
    if not ends:
        return written
    is_end = torch.isin(written, torch.tensor(ends, device=written.device))
    return written.masked_fill(is_end.long().cumsum(dim=1) - is_end.long() > 0, UNKNOWN)
