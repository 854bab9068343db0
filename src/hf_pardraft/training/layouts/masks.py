"""Training attention masks: one predicate per layout, and builders over it, for runs of queries and for flex attention. Pure.

A predicate takes index tensors `(item, head, query, key)` that broadcast against each other, as a flex-attention `mask_mod`
does. Dense builders call it with many indices at once, and flex attention inside its kernel.

Most of a layout's queries stand in small groups (a block, the masks after one prefix) that see the text before their anchor and
themselves. So of queries that stand together each sees one of few keys, and nobody needs a mask of all queries and all keys.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..data.documents import PADDING

Attends = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# How many queries attend at a time: enough for fast products, and few beside the text that they share.
RUN_QUERIES = 256


@dataclass(frozen=True)
class QueryRun:
    """Queries that stand together, and the keys that they could see.

    Attributes:
        queries: which they are.
        context: so many keys from the first one on, the text that they share.
        own: and these, which begin after those: their own and their neighbours'.
    """

    queries: slice
    context: int
    own: slice

    def keys_of(self, values: torch.Tensor) -> torch.Tensor:
        """Its keys, of a tensor `(batch, heads, keys, size)`."""
        context, own = values[:, :, : self.context], values[:, :, self.own]
        return torch.cat([context, own], dim=2) if own.shape[2] else context

    def add_to(self, total: torch.Tensor, values: torch.Tensor) -> None:
        """Add what stands for its keys to a tensor for all keys, in place; the other way round than [`keys_of`]."""
        total[:, :, : self.context] += values[:, :, : self.context]
        total[:, :, self.own] += values[:, :, self.context :]


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

    def runs(self, size: int = RUN_QUERIES) -> list[QueryRun]:
        """All queries, about `size` at a time. Each item's real tokens come first, and masks of one anchor stand together."""
        num_queries = self.num_keys
        # The masks before the first query of a run, in its own group.
        reach = max(int(self.block.max()) - 1, 0)
        found = []
        for start, context in zip(range(0, num_queries, size), _ends(self.index - self.block, size), strict=True):
            stop = min(start + size, num_queries)
            found.append(QueryRun(slice(start, stop), context, slice(max(start - reach, context), stop)))
        return found

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

    def runs(self, size: int = RUN_QUERIES) -> list[QueryRun]:
        """All queries, about `size` at a time, no block in two of them. The anchors of an item ascend."""
        num_queries, length = self.block.shape[1], self.context_document.shape[1]
        block_size = num_queries // (int(self.block.max()) + 1)
        size = max(size // block_size, 1) * block_size
        found = []
        # A block sees what lies before its anchor.
        for start, context in zip(range(0, num_queries, size), _ends(self.anchor - 1, size), strict=True):
            stop = min(start + size, num_queries)
            found.append(QueryRun(slice(start, stop), context, slice(length + start, length + stop)))
        return found

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


def _ends(last_seen: torch.LongTensor, size: int) -> list[int]:
    """Of each `size` queries how many keys of the text they see at most, given the last one of each, `(batch, queries)`."""
    ends = [part.amax() + 1 for part in last_seen.split(size, dim=1)]
    return torch.stack(ends).clamp(min=0).tolist()


def run_mask(queries: PrefixQueries | BlockQueries, run: QueryRun, window: int | None = None) -> torch.BoolTensor:
    """`(batch, queries, keys)`, of those of a run: the predicate of a layout; of a sliding layer, if there is a `window`."""
    (batch, num_queries), device = queries.block.shape, queries.block.device
    item = torch.arange(batch, device=device)[:, None, None]
    query = torch.arange(num_queries, device=device)[run.queries, None]
    key = torch.arange(queries.num_keys, device=device)
    return queries.attends(window)(item, None, query, torch.cat([key[: run.context], key[run.own]]))


def dense_mask(queries: PrefixQueries | BlockQueries, window: int | None = None) -> torch.BoolTensor:
    """`(batch, queries, keys)`, of all of them."""
    every = QueryRun(slice(0, queries.block.shape[1]), queries.num_keys, slice(0, 0))
    return run_mask(queries, every, window)


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
