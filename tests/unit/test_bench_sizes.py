"""Sizes on the command line."""

import pytest

from kvlink.bench.sizes import format_size, parse_size
from kvlink.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("4096", 4096), ("64KiB", 65536), ("256 MiB", 268435456), ("1gib", 1 << 30), ("7B", 7)]
)
def test_a_size_is_a_number_with_a_binary_unit_or_none(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "64KB", "64K", "1.5MiB", "MiB", "4 096", "0x10"])
def test_a_size_that_could_mean_something_else_is_refused(text):
    with pytest.raises(InvalidArgument, match="is not like 4096"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0"), (1000, "1000"), (4096, "4KiB"), (3 << 19, "1536KiB"), (1 << 30, "1GiB")]
)
def test_a_size_is_printed_in_the_largest_unit_that_divides_it(size_bytes, text):
    assert format_size(size_bytes) == text
