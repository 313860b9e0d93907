"""find_overlap against counting bytes one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.layout.disjoint import Lattice, find_overlap


@st.composite
def lattices(draw):
    """Nested strides, as a checked part has them."""
    width = draw(st.integers(1, 4))
    span = width
    axes = []
    for _ in range(draw(st.integers(0, 3))):
        stride = span + draw(st.integers(0, 6))
        count = draw(st.integers(2, 4))
        axes.append((stride, count))
        span += stride * (count - 1)
    return draw(st.integers(0, 60)), tuple(reversed(axes)), width


def bytes_of(lattice):
    starts = [lattice.offset]
    for stride, count in lattice.axes:
        starts = [start + i * stride for start in starts for i in range(count)]
    return {start + i for start in starts for i in range(lattice.width)}


def check(built):
    expected = sum(len(bytes_of(lattice)) for lattice in built) != len(set().union(*map(bytes_of, built)))
    found = find_overlap(built)
    assert (found is not None) == expected
    if found is not None:
        assert bytes_of(found[0]) & bytes_of(found[1])


@settings(max_examples=400, deadline=None)
@given(st.lists(lattices(), min_size=1, max_size=5))
def test_lattices_of_any_shape(specs):
    check([Lattice(str(i), *spec) for i, spec in enumerate(specs)])


@settings(max_examples=400, deadline=None)
@given(lattices(), st.lists(st.integers(0, 40), min_size=2, max_size=6))
def test_lattices_of_one_shape(spec, offsets):
    """The common case: parts of one tensor, which folding tells apart without comparing pairs."""
    check([Lattice(str(i), offset, spec[1], spec[2]) for i, offset in enumerate(offsets)])
