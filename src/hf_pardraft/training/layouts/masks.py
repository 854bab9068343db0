"""Training attention masks: one predicate per layout, and a dense and a flex-attention builder over it. Pure.

A predicate takes index tensors `(item, head, query, key)` that broadcast against each other, as a flex-attention `mask_mod`
does. The dense builder calls it with all indices at once, and flex attention inside its kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..data.documents import PADDING

Attends = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PrefixQueries:
    """Queries of real tokens and of masks after their prefixes, `(batch, queries)` each: PARD's layout, and DART's.

    They are the keys, too.

    Attributes:
        block: number of masks up to and including the query; 0 for real tokens.
        index: the query's place in the sequence.
        document: which packed document it belongs to; `PADDING` for padding.
    """

    block: torch.LongTensor
    index: torch.LongTensor
    document: torch.LongTensor

    @property
    def num_keys(self) -> int:
        return self.block.shape[1]

    def attends(self, window: int | None = None) -> Attends:
        """Whether a query sees another; padding sees itself, so that no softmax is over nothing.

        Args:
            window: of a sliding layer, how many tokens a query sees, itself counted; `None` for all.
        """
        parts = (self.block, self.index, self.document)

        def sees(item, head, query, key):
            query_parts = [part[item, query] for part in parts]
            key_parts = [part[item, key] for part in parts]
            found = pard_attends(*query_parts, *key_parts)
            if window is not None:
                found = found & (key_parts[1] > query_parts[1] - window)
            return found | (query == key)

        return sees


@dataclass(frozen=True)
class BlockQueries:
    """Queries of a batch of anchored blocks. The keys are the context that they share and, after it, themselves.

    Attributes:
        anchor: `(batch, queries)`, where the query's block is anchored in the sequence; `PADDING` for padding blocks.
        index: `(batch, queries)`, the query's place in the sequence: its anchor's, and one more for each one of the block.
        block: `(batch, queries)`, the number of the query's block.
        context_document: `(batch, context)`, the packed document of each context position; `PADDING` for padding.
    """

    anchor: torch.LongTensor
    index: torch.LongTensor
    block: torch.LongTensor
    context_document: torch.LongTensor

    @property
    def num_keys(self) -> int:
        return self.context_document.shape[1] + self.block.shape[1]

    def attends(self, window: int | None = None) -> Attends:
        """Whether a query sees a context position or, after them, a query.

        Args:
            window: of a sliding layer, how far to either side a query sees; `None` for any distance.
        """
        anchor, index, block, context_document = self.anchor, self.index, self.block, self.context_document
        length = context_document.shape[1]
        document = context_document.gather(1, anchor.clamp(min=0))

        def sees(item, head, query, key):
            place, other = key.clamp(max=length - 1), (key - length).clamp(min=0)
            on_context = block_attends_context(
                anchor[item, query], document[item, query], place, context_document[item, place]
            )
            on_block = block_attends_block(block[item, query], block[item, other])
            found = torch.where(key < length, on_context, on_block)
            if window is None:
                return found
            key_index = torch.where(key < length, place, index[item, other])
            return found & ((index[item, query] - key_index).abs() <= window)

        return sees


def pard_attends(query_block, query_index, query_document, key_block, key_index, key_document):
    """Whether a PARD query sees another: its prefix of real tokens, and the masks between that prefix and itself.

    Query (j, p) stands j masks after the prefix that ends at its anchor a = p - j, as at inference (arXiv 2504.18583, eq. 7 and
    figure 4b): it sees real tokens up to a, and of the masks those of the same anchor, up to its own. DART's prefix-shared
    ones see the same (arXiv 2601.19278, section 3.3, figure 4): prompt causal, mask preceding, mask causal.
    """
    anchor = query_index - query_block
    sees_token = (key_block == 0) & (key_index <= anchor)
    sees_mask = (key_block > 0) & (key_block <= query_block) & (key_index - key_block == anchor)
    return (query_document == key_document) & (query_document != PADDING) & (sees_token | sees_mask)


def block_attends_context(anchor, document, context_index, context_document):
    """Whether a block sees a context position: strictly before its anchor (arXiv 2606.02091, section 3.3), in its document."""
    return (context_index < anchor) & (context_document == document)


def block_attends_block(query_block, key_block):
    """Whether a query of a block sees another: both ways inside a block, never across blocks."""
    return query_block == key_block


def document_attends(query_index, query_document, key_index, key_document):
    """Whether a token of packed documents sees another: those of its own document up to itself."""
    return (key_index <= query_index) & (key_document == query_document) & (query_document != PADDING)


def dense_mask(queries: PrefixQueries | BlockQueries, window: int | None = None) -> torch.BoolTensor:
    """`(batch, queries, keys)`: the predicate of a layout, everywhere; of a sliding layer, if there is a `window`."""
    (batch, num_queries), device = queries.block.shape, queries.block.device
    item = torch.arange(batch, device=device)[:, None, None]
    query = torch.arange(num_queries, device=device)[:, None]
    return queries.attends(window)(item, None, query, torch.arange(queries.num_keys, device=device))


def flex_mask(queries: PrefixQueries | BlockQueries, window: int | None = None, compiled: bool = False) -> BlockMask:
    """The same for flex attention, which computes nothing for tiles of queries and keys that don't see each other.

    Args:
        queries: of a layout.
        window: of a sliding layer.
        compiled: whether to compile the construction, which then needs no `(batch, queries, keys)` tensor.
    """
    batch, num_queries = queries.block.shape
    predicate, device = queries.attends(window), queries.block.device
    return create_block_mask(predicate, batch, None, num_queries, queries.num_keys, device=device, _compile=compiled)


def document_mask(documents: torch.LongTensor) -> torch.BoolTensor:
    """`(batch, length, length)` from the documents `(batch, length)` of packed texts: what each token of the target sees."""
    index = torch.arange(documents.shape[1], device=documents.device)
    sees = document_attends(index[:, None], documents[:, :, None], index, documents[:, None])
    return sees | (index[:, None] == index)
