"""Medians, and values between those that are known. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise


def lower_median(values) -> float:
    """The median; of two in the middle the lower one, so that a single outlier among two values is not believed."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def weighted_median(weighted: list[tuple[float, float]]) -> float:
    """The median of values with weights; of two in the middle the lower one."""
    ordered, below = sorted(weighted), 0.0
    half = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        below += weight
        if below >= half:
            return value
    raise ValueError("expected at least one value")


def interpolated(points: list[tuple[int, float]], size: int, since: int = 1) -> float | None:
    """The value at `size` on the lines through points of different sizes, sorted; `None` of fewer than two points.

    Beyond the last point it goes on as steeply as from the point `since` to the last, but not down; the first one is mostly of no
    draft at all. Before the first point it goes on as from there to the second, but not below that part of the first one's value
    that its size is of the first one's.
    """
    points = [(at, min(value for place, value in points if place == at)) for at in sorted({at for at, _ in points})]
    if len(points) < 2:
        return None
    after = next((index for index, (at, _) in enumerate(points) if at >= size), None)
    (left, low), (right, high) = (
        points[since if after is None else max(after, 1) - 1],
        points[-1 if after is None else max(after, 1)],
    )
    slope = (high - low) / (right - left) if right > left else 0.0
    if after is None:
        return high + max(slope, 0.0) * (size - right)
    found = low + slope * (size - left)
    return max(found, low * size / left) if size < left else found


def along(points: Sequence[tuple[float, float]], places: Iterable[float]) -> Iterator[float]:
    """The values at some places on the lines through points; both in order, and no place is beyond the points."""
    lines = pairwise(points)
    (left, low), (right, high) = next(lines)
    for place in places:
        while place > right:
            (left, low), (right, high) = next(lines)
        yield low + (high - low) * (place - left) / (right - left)


def rising(points: Sequence[tuple[int, float, float]]) -> list[tuple[int, float]]:
    """The values that come closest to those of some points and never fall: isotonic regression by pooling adjacent violators.

    Args:
        points: place, value and weight of each, in the order of the places.
    """
    pools: list[tuple[list[int], float, float]] = []
    for place, value, weight in points:
        places = [place]
        while pools and pools[-1][1] > value:
            before, low, weight_before = pools.pop()
            value = (weight_before * low + weight * value) / (weight_before + weight)
            places, weight = before + places, weight_before + weight
        pools.append((places, value, weight))
    return [(place, value) for places, value, _ in pools for place in places]


def on_a_line(points: Sequence[tuple[float, float, float]], place: float) -> float | None:
    """The value at a place on the line that comes closest to some points, by least squares; one that never falls.

    Args:
        points: place, value and weight of each.
        place: where.

    Returns:
        `None` of points at fewer than three places, which tell nothing that they don't tell by themselves.
    """
    if len({at for at, _, _ in points}) < 3:
        return None
    total = sum(weight for _, _, weight in points)
    middle = sum(weight * at for at, _, weight in points) / total
    mean = sum(weight * value for _, value, weight in points) / total
    rises = sum(weight * (at - middle) * (value - mean) for at, value, weight in points)
    spread = sum(weight * (at - middle) ** 2 for at, _, weight in points)
    return mean + max(rises / spread, 0.0) * (place - middle)
