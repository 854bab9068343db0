"""Between tokens, the target's ids, and columns, their places among the logits of a drafter that proposes some tokens only. Pure.

`token_ids (draft vocabulary,)`, ascending, are the tokens of the columns; `None` where both are the same.
"""

import torch


def tokens_of(columns: torch.LongTensor, token_ids: torch.LongTensor | None) -> torch.LongTensor:
    """The tokens of columns, of any shape."""
    return columns if token_ids is None else token_ids[columns]


def columns_of(tokens: torch.LongTensor, token_ids: torch.LongTensor | None) -> torch.LongTensor:
    """The columns of tokens that have one, of any shape."""
    return tokens if token_ids is None else torch.searchsorted(token_ids, tokens)
