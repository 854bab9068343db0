"""What is looked at in a training set before it is used: its first example, and how many are held out."""

from collections.abc import Iterable
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)


def first_row(data: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The first example.

    Raises:
        ValueError: if there is none, or it is no dict.
    """
    row = next(iter(data), None)
    if row is None:
        raise ValueError("the data set is empty: expected at least one example")
    if not isinstance(row, dict):
        raise ValueError(f"expected examples that are dicts of columns, got {type(row).__name__}")
    return row


def split_off(data: Any, count: int, seed: int, is_asked_for: bool = False) -> tuple[Any, Any]:
    """The data without some examples, and these: `count`, or a tenth of all if that is less; `None` if that is none.

    Args:
        data: a data set.
        count: how many are wanted.
        seed: of the choice.
        is_asked_for: whether somebody chose `count`, who is to know if it is not what they get.

    Raises:
        ValueError: if it is asked for, and there are not as many examples.
    """
    if is_asked_for and count >= len(data):
        raise ValueError(
            f"eval_size is {count}, and the data set has {len(data)} examples, of which some are to be learned: ask for fewer (a "
            "tenth at most is held out), or pass an --eval-dataset"
        )
    if is_asked_for and count > len(data) // 10:
        logger.warning("held out %d of %d examples rather than %d: a tenth at most", len(data) // 10, len(data), count)
    count = min(count, len(data) // 10)
    if count == 0:
        return data, None
    parts = data.train_test_split(test_size=count, seed=seed)
    return parts["train"], parts["test"]
