"""Dropped masks, for PARD: real tokens, then the masks of further drafted tokens that COD keeps (arXiv 2504.18583)."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..data.documents import IGNORED, PADDING, checked, positions_in_documents
from ..vocabulary import of_own_rows
from .attention import layout_attention
from .base import Batch, Layout, Scorer, SupervisedPositions, predicts_supervised, some_of, stacked

if TYPE_CHECKING:
    from ..arguments import DraftTrainingArguments


def one_place_later(features: torch.Tensor) -> torch.Tensor:
    """What enters a PARD-2 projection at each token of a text: `(batch, length, dim)`, each token's predecessor's features."""
    return nn.functional.pad(features, (0, 0, 1, -1))


def conditional_drop(
    predicts: torch.BoolTensor, num_tokens: int, retention: float, min_retention: float, generator: torch.Generator
) -> list[torch.LongTensor]:
    """COD: which positions each subtask keeps (arXiv 2504.18583, section 3.2.2 and algorithm 1).

    Block 0 keeps every position that predicts something. Block j keeps N max(r^j, r_min) of those whose left neighbour
    block j - 1 kept, so the masks before a kept one are all there: its keys and values are whole. N counts supervised
    positions only, and a chain that meets an unsupervised one ends there.

    Args:
        predicts: `(length,)`, see [`predicts_supervised`].
        num_tokens: K, the number of subtasks.
        retention, min_retention: r and r_min of eq. 11.
        generator: where the randomness comes from.

    Returns:
        One ascending `(kept,)` index tensor per block 0..K-1.
    """
    kept = [predicts.nonzero()[:, 0]]
    for block in range(1, num_tokens):
        candidates = kept[-1] + 1
        candidates = candidates[candidates < len(predicts)]
        candidates = candidates[predicts[candidates]]
        # 100 * 0.7**2 is 49, and a little less in floating point.
        quota = int(round(len(kept[0]) * max(retention**block, min_retention), 6))
        if len(candidates) > quota:
            candidates = some_of(candidates, quota, generator)
        kept.append(candidates)
    return kept


class DroppedMasks(Layout):
    """All real tokens of an example, then the masks that COD keeps of the subtasks k > 1, anchor by anchor.

    A batch holds, `(batch, queries)` each: `input_ids`, `position_ids`, `labels` (what the query itself must predict; no
    shift), `draft_positions` (k of eq. 8, from 1; 0 for padding), and what the mask is made of: `query_block`, `query_index`,
    `query_document`. Only kept masks are ever built; each example has a pattern of its own.

    Args:
        mask_token_id: id of the mask token, or a list with an id for each place: block j, j places after its prefix, has the
            j-th of them, as in drafting.
        num_tokens: K, how many tokens the drafter learns to draft.
        retention, min_retention: COD's r and r_min; r = 1 keeps all.
        seed: of the patterns.
    """

    learns_mask_token = True

    def __init__(
        self,
        mask_token_id: int | list[int],
        num_tokens: int = 8,
        retention: float = 0.7,
        min_retention: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        if isinstance(mask_token_id, list) and len(mask_token_id) < num_tokens - 1:
            raise ValueError(
                f"{num_tokens} tokens are drafted with {num_tokens - 1} masks, got ids for {len(mask_token_id)} of them: pass "
                "more, a single one for all, or a smaller num_tokens"
            )
        self.mask_token_id = mask_token_id
        self.num_tokens = num_tokens
        self.retention = retention
        self.min_retention = min_retention

    @classmethod
    def for_drafter(cls, drafter: PreTrainedModel, args: "DraftTrainingArguments") -> "DroppedMasks":
        config = drafter.config
        mask_token_id = config.pard_token if config.pard_tokens is None else config.mask_token_ids
        return cls(mask_token_id, args.draft_tokens, args.cod_retention, args.cod_min_retention, args.seed)

    def lay_out(self, example: dict[str, Any]) -> Batch:
        """The queries of one example, `(queries,)` each."""
        input_ids, labels, documents = checked(example)
        predicts = predicts_supervised(labels, documents)
        generator = self.generator(input_ids)
        kept = conditional_drop(predicts, self.num_tokens, self.retention, self.min_retention, generator)
        # Block 0 is also everybody's context, so it has all tokens, those that predict nothing included.
        kept[0] = torch.arange(len(input_ids))
        block = torch.cat([torch.full_like(index, j) for j, index in enumerate(kept)])
        index = torch.cat(kept)
        # Masks that see each other stand together.
        order = torch.where(block == 0, -1, index - block).argsort(stable=True)
        block, index = block[order], index[order]
        next_labels = torch.cat([labels[1:], labels.new_full((1,), IGNORED)]).masked_fill(~predicts, IGNORED)
        return {
            "input_ids": torch.where(block == 0, input_ids[index], self._masks()[block - 1]),
            "position_ids": positions_in_documents(documents)[index],
            "labels": next_labels[index],
            "draft_positions": block + 1,
            "query_block": block,
            "query_index": index,
            "query_document": documents[index],
        }

    def _masks(self) -> torch.LongTensor:
        # One for each block after the first; there is one at least, so that it can be indexed by the first, too.
        shared = isinstance(self.mask_token_id, int)
        return torch.tensor([self.mask_token_id] * max(self.num_tokens - 1, 1) if shared else self.mask_token_id)

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        return stacked([self.lay_out(example) for example in examples], {"labels": IGNORED, "query_document": PADDING})

    @classmethod
    def text(cls, batch: Batch) -> tuple[torch.LongTensor, torch.LongTensor]:
        """The real tokens, which every example's queries begin with."""
        real = (batch["query_block"] == 0) & (batch["query_document"] != PADDING)
        length = int(real.sum(dim=1).max())
        documents = batch["query_document"].masked_fill(~real, PADDING)
        return batch["input_ids"][:, :length], documents[:, :length]

    @classmethod
    def supervised(cls, batch: Batch, drafter: PreTrainedModel) -> SupervisedPositions:
        """Query (j, p) drafts the token at p + 1 from the prefix that ends at p - j."""
        return SupervisedPositions.of_queries(batch["query_index"], batch, **cls.vocabulary(drafter))

    @classmethod
    def forward(
        cls,
        model: nn.Module,
        drafter: PreTrainedModel,
        target: PreTrainedModel | None,
        batch: Batch,
        features: torch.Tensor | None,
        score: Scorer,
    ) -> Any:
        """An ordinary causal LM, with a mask that shows each query what inference shows it.

        With features (PARD-2), each query gets those that its anchor gets, the last real token that it sees.
        """
        injected = {}
        if features is not None:
            anchors = batch["query_index"] - batch["query_block"]
            # A document's first token has no predecessor, whatever stands before it in a packed example.
            is_first = batch["position_ids"][:, : features.shape[1]] == 0
            shifted = one_place_later(features).masked_fill(is_first[:, :, None], 0)
            injected = {"target_features": shifted, "feature_rows": anchors}
        return model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            **layout_attention(cls.queries(batch), drafter),
            use_cache=False,
            logits_to_keep=batch["labels"] != IGNORED,
            read_rows=of_own_rows(drafter, score),
            **injected,
        )
