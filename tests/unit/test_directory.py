"""What a directory lists, and who hears of it."""

from __future__ import annotations

import msgspec
import pytest

from kvlink import errors
from kvlink.directory import EtcdDirectory, Listing, StaticDirectory, WorkerEntry
from kvlink.directory.endpoints import Backoff, Certificates, EtcdConnection, EtcdFailed, parse_endpoints
from kvlink.directory.etcd import parse_entry


def entry(number: int, *, free: int = 8, **fields: object) -> WorkerEntry:
    known = {"name": f"decode-{number}", "address": f"127.0.0.1:{7000 + number}", "epoch": f"{number:032x}"}
    counts = {"blocks": {"full": 8}, "free_blocks": {"full": free}, "block_tokens": {"full": 4}}
    return WorkerEntry(**{**known, **counts, **fields})  # type: ignore[arg-type]


def test_watchers_hear_what_is_so_and_each_change_once() -> None:
    directory = StaticDirectory([entry(1)])
    heard: list[Listing] = []
    stop = directory.watch(heard.append)
    directory.put(entry(1))  # no change
    directory.put(entry(2))
    directory.remove(entry(1).epoch)
    directory.remove(entry(1).epoch)
    stop()
    directory.put(entry(3))
    assert [sorted(one.name for one in listing.workers.values()) for listing in heard] == [
        ["decode-1"],
        ["decode-1", "decode-2"],
        ["decode-2"],
    ]
    assert not any(listing.stale for listing in heard)


def test_a_registration_lists_a_worker_through_its_lives() -> None:
    directory = StaticDirectory()
    now = entry(1, free=8)
    registration = directory.register(lambda: now)
    now = entry(1, free=3)
    registration.changed()
    assert directory.listing().workers[now.epoch].free_blocks == {"full": 3}
    now = entry(2)
    registration.changed()
    assert list(directory.listing().workers) == [now.epoch]
    for _ in range(2):
        registration.close()
    registration.changed()
    assert not directory.listing().workers


def test_a_list_with_the_same_life_twice_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="listed twice"):
        StaticDirectory([entry(1), entry(1)])


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"epoch": "7"},
        {"blocks": {"full": -1}},
        {"free_blocks": {"sliding": 1}},
        {"block_tokens": {"full": "4"}},
        {"load": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_entry_from_anywhere_is_checked_before_it_is_believed(change: dict[str, object]) -> None:
    fields = {**msgspec.to_builtins(entry(1)), "of a later version": 1}
    assert msgspec.json.decode(msgspec.json.encode(fields), type=WorkerEntry) == entry(1)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({**fields, **change}), type=WorkerEntry)


def test_an_entry_whose_unknown_field_is_nested_too_deep_is_refused_as_others_are() -> None:
    listed = msgspec.json.encode(entry(1))
    assert parse_entry(listed) == entry(1)
    with pytest.raises(ValueError, match="recursion"):
        parse_entry(listed[:-1] + b',"new":' + b"[" * 5000 + b"]" * 5000 + b"}")


def test_endpoints_are_read_as_people_write_them() -> None:
    assert parse_endpoints(["etcd-0", "http://10.0.0.1:99", "https://[::1]:2380/"]) == [
        ("http", "etcd-0", 2379),
        ("http", "10.0.0.1", 99),
        ("https", "::1", 2380),
    ]
    for wrong in ([], "etcd-0", ["ftp://a"], ["a:port"], ["http://a/path"], [""]):
        with pytest.raises(errors.ConfigError):
            parse_endpoints(wrong)
    for options in ({"ttl_s": 1}, {"ttl_s": float("nan")}, {"prefix": ""}):
        with pytest.raises(errors.ConfigError):
            EtcdDirectory(["127.0.0.1:1"], **options)  # type: ignore[arg-type]


def test_waits_after_failures_grow_to_a_bound() -> None:
    backoff = Backoff(first_s=0.1, most_s=0.4)
    waits = [backoff.next_s() for _ in range(5)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, (0.1, 0.2, 0.4, 0.4, 0.4), strict=True))
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_certificates_are_for_the_connection_and_proxies_are_not() -> None:
    connection = EtcdConnection(
        parse_endpoints(["https://etcd-0"]),
        timeout_s=1,
        certificates=Certificates(authority="ca.pem", own=("own.pem", "own.key")),
    )
    session = connection.call(lambda client: client.session)
    assert (session.verify, session.cert, session.trust_env) == ("ca.pem", ("own.pem", "own.key"), False)
    plain = EtcdConnection(parse_endpoints(["etcd-0"]), timeout_s=1, certificates=Certificates())
    assert plain.call(lambda client: (client.session.verify, client.session.cert)) == (True, None)


def test_the_next_endpoint_is_tried_after_one_that_does_not_answer() -> None:
    connection = EtcdConnection(
        parse_endpoints(["127.0.0.1:1", "127.0.0.1:2"]), timeout_s=1, certificates=Certificates()
    )
    tried = []
    for _ in range(3):
        tried.append(connection.endpoint)
        with pytest.raises(EtcdFailed, match=r"127\.0\.0\.1") as caught:
            connection.call(lambda client: client.status())
        assert not caught.value.answered
    assert tried[0] == tried[2] != tried[1]
