"""Addresses as text: what is one, and what is refused."""

from __future__ import annotations

import pytest

from kvlink.handoff.address import join_address, split_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:7000", ("10.0.0.1", 7000)),
        ("decode-3.example:1", ("decode-3.example", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:7000", ("fe80::1%eth0", 7000)),
    ],
)
def test_an_address_is_the_same_once_it_was_taken_apart_and_joined(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address
    assert join_address(*address) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("10.0.0.1", "is not host:port"),
        ("10.0.0.1:", "is not host:port"),
        ("10.0.0.1:seven", "is not host:port"),
        ("10.0.0.1:700000", "is not host:port"),
        ("10.0.0.1:0", r"port 0 is outside \[1, 65535\]"),
        ("10.0.0.1:65536", r"port 65536 is outside \[1, 65535\]"),
        ("::1:7000", "write an IPv6 address in brackets"),
        (":7000", "names no host"),
        ("[]:7000", "names no host"),
        ("[[]]:7000", "names no host"),
        ("a]:7000", "names no host"),
        ("a b:7000", "names no host"),
        ("a\x00:7000", "names no host"),
    ],
)
def test_what_is_no_address_is_refused_with_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        split_address(text)
