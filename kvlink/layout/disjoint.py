"""Whether strided parts of memory share a byte: they come from a peer, and interleave in any order of axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvlink.errors import InvalidArgument

__all__ = ["Lattice", "find_overlap"]

# Steps of the exact comparison, which only irregular layouts need. About a second of work at most.
_MAX_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Lattice:
    """Runs of ``width`` bytes at ``offset + sum(i * stride)`` for each axis ``(stride, count)``.

    Axes are sorted by falling stride and have more than one element, and each stride spans all that lies inside.
    ``blocks`` is the axis that counts blocks: two groups of one ``block_pool`` may share the bytes of a block.
    """

    name: str
    offset: int
    axes: tuple[tuple[int, int], ...]
    width: int
    block_pool: str | None = None
    group: str = ""
    blocks: tuple[int, int] = (0, 1)
    span: int = field(init=False)

    def __post_init__(self) -> None:
        """Count the bytes from the first to one past the last."""
        object.__setattr__(self, "span", _span(self.axes, self.width))


def find_overlap(lattices: Sequence[Lattice]) -> tuple[Lattice, Lattice] | None:
    """Return two lattices that share a byte and may not, or ``None``.

    Lattices whose bounds meet are folded by their outermost stride until their bounds no longer meet. That takes
    O(n log n) for any regular order of axes; what is left is compared in pairs.

    Raises
    ------
    InvalidArgument
        If the layout is too irregular to be proved free of overlaps.
    """
    budget = [_MAX_STEPS]
    for cluster in _clusters([(lattice.offset, 0, lattice) for lattice in lattices]):
        for left, right in _suspects(cluster):
            delta = right.offset - left.offset
            if _meet(delta, left.axes, left.width, right.axes, right.width, budget) and not _may_meet(
                left, right, budget
            ):
                return left, right
    return None


def _may_meet(left: Lattice, right: Lattice, budget: list[int]) -> bool:
    """Whether two lattices are of one block pool, and meet nowhere but in blocks of the same number."""
    if (
        left.block_pool is None
        or left.block_pool != right.block_pool
        or left.group == right.group
        or left.blocks != right.blocks
    ):
        return False
    stride, count = left.blocks
    if count == 1:
        return True
    inner_left = tuple(axis for axis in left.axes if axis != left.blocks)
    inner_right = tuple(axis for axis in right.axes if axis != right.blocks)
    delta = right.offset - left.offset
    first, last = _meeting_steps(
        delta, stride, _span(inner_left, left.width), _span(inner_right, right.width), range(1 - count, count)
    )
    return not any(
        _meet(delta + step * stride, inner_left, left.width, inner_right, right.width, budget)
        for step in range(first, last + 1)
        if step != 0
    )


# A lattice that was folded: where it starts now, how many outer axes are gone, and the whole.
_Folded = tuple[int, int, Lattice]


def _span(axes: tuple[tuple[int, int], ...], width: int) -> int:
    return sum(stride * (count - 1) for stride, count in axes) + width


def _clusters(items: list[_Folded]) -> Iterator[list[_Folded]]:
    """Yield sets of two or more whose bounds touch each other, directly or through others."""
    items.sort(key=lambda item: item[0])
    cluster: list[_Folded] = []
    end = 0
    for item in items:
        start, folds, lattice = item
        if cluster and start >= end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(item)
        own_end = start + (_span(lattice.axes[folds:], lattice.width) if folds else lattice.span)
        end = own_end if len(cluster) == 1 else max(end, own_end)
    if len(cluster) > 1:
        yield cluster


def _suspects(cluster: list[_Folded]) -> Iterator[tuple[Lattice, Lattice]]:
    """Yield the pairs of a cluster that folding cannot tell apart."""
    strides = {lattice.axes[folds][0] if len(lattice.axes) > folds else 0 for _, folds, lattice in cluster}
    stride = strides.pop()
    origin = cluster[0][0]
    folded = [
        ((start - origin) % stride, folds + 1, lattice) for start, folds, lattice in cluster if stride and not strides
    ]
    wraps = any(start + _span(lattice.axes[folds:], lattice.width) > stride for start, folds, lattice in folded)
    if not folded or wraps:
        for i, (_, _, left) in enumerate(cluster):
            for _, _, right in cluster[i + 1 :]:
                yield left, right
        return
    for inner in _clusters(folded):
        yield from _suspects(inner)


def _meet(
    delta: int,
    left: tuple[tuple[int, int], ...],
    left_width: int,
    right: tuple[tuple[int, int], ...],
    right_width: int,
    budget: list[int],
) -> bool:
    """Whether `left` at 0 and `right` at `delta` share a byte."""
    budget[0] -= 1
    if budget[0] < 0:
        raise InvalidArgument("the layout is too irregular to be proved free of overlaps")
    if delta >= _span(left, left_width) or -delta >= _span(right, right_width):
        return False
    if not left and not right:
        return True
    # Fold the axis with the largest stride, of both sides at once where they share it.
    left_stride = left[0][0] if left else 0
    right_stride = right[0][0] if right else 0
    stride = max(left_stride, right_stride)
    fewest, most = 0, 0
    inner_left, inner_right = left, right
    if left_stride == stride:
        fewest, inner_left = 1 - left[0][1], left[1:]
    if right_stride == stride:
        most, inner_right = right[0][1] - 1, right[1:]
    first, last = _meeting_steps(
        delta, stride, _span(inner_left, left_width), _span(inner_right, right_width), range(fewest, most + 1)
    )
    return any(
        _meet(delta + step * stride, inner_left, left_width, inner_right, right_width, budget)
        for step in range(first, last + 1)
    )


def _meeting_steps(delta: int, stride: int, left_span: int, right_span: int, steps: range) -> tuple[int, int]:
    """Return the first and last of `steps` at which the bounds of what is inside meet."""
    # delta + step * stride must lie strictly between -right_span and left_span.
    first = -((delta + right_span - 1) // stride)
    last = (left_span - delta - 1) // stride
    return max(first, steps.start), min(last, steps.stop - 1)
