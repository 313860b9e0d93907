"""Which of a host's addresses carries the bytes of a node, where it listens on one or on all of them."""

from __future__ import annotations

import pytest

from kvlink.handoff import data_host


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has 10.0.0.4 and fd00::4 on one interface."""
    of_host = {"10.0.0.4": "eth1", "fd00::4": "eth1", "127.0.0.1": "lo", "::1": "lo"}
    monkeypatch.setattr(data_host, "interface_of", of_host.get)


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("bound", "advertised", "expected"),
    [
        ("10.0.0.9", "10.0.0.4:7000", "10.0.0.9"),
        ("0.0.0.0", "10.0.0.4:7000", "10.0.0.4"),
        ("::", "[fd00::4]:7000", "fd00::4"),
        ("0.0.0.0", "127.0.0.1:7000", "0.0.0.0"),
        ("0.0.0.0", "198.51.100.7:7000", "0.0.0.0"),
        ("0.0.0.0", "no-such-name.invalid:7000", "0.0.0.0"),
    ],
    ids=["one address", "advertised", "advertised IPv6", "this host alone", "another machine's", "unknown name"],
)
def test_bytes_go_by_the_advertised_address_where_it_is_this_hosts(bound: str, advertised: str, expected: str) -> None:
    assert data_host.data_host(bound, advertised) == expected
