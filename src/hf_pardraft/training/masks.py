"""Training attention masks, one predicate per layout, and a dense builder over them. Pure: tensors in, tensors out.

A predicate works element by element on index tensors that broadcast against each other, so a flex-attention `mask_mod`
can call it as well as the dense builder.
"""

from dataclasses import dataclass

import torch

PADDING = -1


@dataclass(frozen=True)
class PardRows:
    """Rows of real tokens and of masks behind their prefixes, `(batch, rows)` each: PARD's layout, and DART's.

    Attributes:
        block: number of masks up to and including the row; 0 for real tokens.
        index: the row's place in the sequence.
        document: which packed document it belongs to; `PADDING` for padding.
    """

    block: torch.LongTensor
    index: torch.LongTensor
    document: torch.LongTensor


@dataclass(frozen=True)
class BlockRows:
    """Rows of a batch of anchored blocks.

    Attributes:
        anchor: `(batch, rows)`, where the row's block is anchored in the sequence; `PADDING` for padding blocks.
        block: `(batch, rows)`, the number of the row's block.
    """

    anchor: torch.LongTensor
    block: torch.LongTensor


def pard_attends(query_block, query_index, query_document, key_block, key_index, key_document):
    """Whether a PARD row sees another: its prefix of real tokens, and the masks between that prefix and itself.

    Row (j, p) stands j masks behind the prefix that ends at its anchor a = p - j, as at inference (pard.txt, eq. 7 and
    figure 4b): it sees real tokens up to a, and of the masks those of the same anchor, up to its own. DART's prefix-shared
    rows see the same (dart.txt, section 3.3, figure 4): prompt causal, mask preceding, mask causal.
    """
    anchor = query_index - query_block
    sees_token = (key_block == 0) & (key_index <= anchor)
    sees_mask = (key_block > 0) & (key_block <= query_block) & (key_index - key_block == anchor)
    return (query_document == key_document) & (query_document != PADDING) & (sees_token | sees_mask)


def block_attends_context(anchor, context_index, context_is_real):
    """Whether a block row sees a context position: strictly before its anchor (dflare.txt, section 3.3)."""
    return (context_index < anchor) & context_is_real


def block_attends_block(query_block, key_block):
    """Whether a block row sees another: both ways inside a block, never across blocks."""
    return query_block == key_block


def pard_mask(rows: PardRows) -> torch.BoolTensor:
    """`(batch, rows, rows)`; a padding row sees itself, so that no softmax is over nothing."""
    query = [part[:, :, None] for part in (rows.block, rows.index, rows.document)]
    key = [part[:, None, :] for part in (rows.block, rows.index, rows.document)]
    itself = torch.eye(rows.block.shape[1], dtype=torch.bool, device=rows.block.device)
    return pard_attends(*query, *key) | itself


def block_mask(rows: BlockRows, context_is_real: torch.BoolTensor) -> torch.BoolTensor:
    """`(batch, rows, context + rows)`, from block rows and which context positions `(batch, context)` are not padding."""
    context_index = torch.arange(context_is_real.shape[1], device=context_is_real.device)
    on_context = block_attends_context(rows.anchor[:, :, None], context_index, context_is_real[:, None, :])
    on_blocks = block_attends_block(rows.block[:, :, None], rows.block[:, None, :])
    return torch.cat([on_context, on_blocks], dim=-1)
