"""What peers ask and answer once they have proved the secret, and what stands in a directory.

Announcements under a key, a scheduler's questions to a decode worker, a worker's entry, addresses. Each is what its
type says, or refused with the error that its reader expects.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from fuzz.draws import Draws
from fuzz.samples import EPOCH, as_plain, reservation, worker_entry
from kvlink import wire
from kvlink.config import Limits
from kvlink.directory.etcd import parse_entry
from kvlink.errors import ProtocolError
from kvlink.handoff.address import join_address, split_address
from kvlink.handoff.answer import Answerer
from kvlink.handoff.deadline import Deadline
from kvlink.handoff.rendezvous import ANNOUNCE, Rendezvous
from kvlink.scheduler.messages import Reserve, Reserved, Withdraw, pack, unpack

_ANNOUNCED = {"key": "request-7", "ticket": reservation()}
_RESERVE = msgspec.to_builtins(Reserve(request="r", num_tokens=4, room_tokens=8, ttl_ms=1000))
_RESERVED = msgspec.to_builtins(Reserved(ticket=reservation(), free_blocks={"full": 3}, load=1))
_WITHDRAW = msgspec.to_builtins(Withdraw(request="r"))
_ASK = as_plain(wire.Ask(number=1, kind=ANNOUNCE, remaining_ms=1000, body=b""))
_ANSWER = as_plain(wire.Answer(number=1, body=b"yes", code="Busy", message="later"))


def _packed(draws: Draws, usual: dict[str, Any], encode: Any = msgspec.msgpack.encode) -> bytes:
    if draws.byte() >= 224:
        return draws.rest()
    return cast("bytes", encode(draws.spoiled(usual)))


def _announce(draws: Draws) -> None:
    """Ask a node's answerer, as ``Answerer.serve`` does with what came over the connection."""
    book = Rendezvous(name="decode-1")
    answerer = Answerer(name="decode-1", limits=Limits())
    answerer.register(ANNOUNCE, book.answer)
    for _ in range(1 + draws.below(2)):
        body = _packed(draws, _ANNOUNCED)
        try:
            asked = wire.decode(_packed(draws, {**_ASK, "body": body}), wire.Ask)
        except ProtocolError:
            continue
        if isinstance(asked, wire.Refuse):
            continue
        asker = wire.IntroduceAsker(epoch=EPOCH, name="prefill-1", address="prefill-1:7000")
        session = cast("Any", _Session())
        answer = answerer._answer(session, asker, asked)
        assert answer.number == asked.number
        assert answer.code != "TransportFailed", answer.message
        assert len(wire.encode(answer)) <= wire.SEALED_FRAME_BYTES


class _Session:
    is_ending = False
    deadline: Deadline | None = None


def _ask(draws: Draws) -> None:
    kinds: tuple[tuple[type[msgspec.Struct], Any], ...] = (
        (Reserve, _RESERVE),
        (Reserved, _RESERVED),
        (Withdraw, _WITHDRAW),
    )
    kind, usual = kinds[draws.below(len(kinds))]
    try:
        read = unpack(_packed(draws, usual), kind)
    except ProtocolError:
        return
    assert unpack(pack(read), kind) == read


def _answer(draws: Draws) -> None:
    try:
        read = wire.decode(_packed(draws, _ANSWER), wire.Answer)
    except ProtocolError:
        return
    assert wire.decode(wire.encode(read), wire.Answer) == read


def _list(draws: Draws) -> None:
    try:
        read = parse_entry(_packed(draws, worker_entry(), msgspec.json.encode))
    except ValueError:
        return
    assert parse_entry(msgspec.json.encode(read)) == read
    assert read.blocks.keys() == read.free_blocks.keys() == read.block_tokens.keys()


def _find(draws: Draws) -> None:
    text = draws.bytes(64).decode("latin-1")
    try:
        host, port = split_address.__wrapped__(text)
    except ValueError:
        return
    assert split_address.__wrapped__(join_address(host, port)) == (host, port)


def one(data: bytes) -> None:
    """Read one question, answer, entry or address."""
    draws = Draws(data)
    (_announce, _announce, _ask, _answer, _list, _find)[draws.below(6)](draws)
