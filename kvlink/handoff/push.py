"""What users hold of one push, on either side."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import msgspec

from kvlink.errors import FailedRange, InvalidArgument, KvlinkError
from kvlink.handoff.arguments import check_payload
from kvlink.handoff.block_tables import Blocks, Group, block_tables
from kvlink.handoff.handles import Handle, explain_mismatch

if TYPE_CHECKING:
    from kvlink.handoff.call import Call
    from kvlink.handoff.gather import Contact
    from kvlink.handoff.native import NativeHandoff, NativePush
    from kvlink.handoff.node import Node
    from kvlink.handoff.rendezvous import Announcement
    from kvlink.handoff.reservation import Reservation

__all__ = ["Fence", "Push", "Slot"]

Fence = Any
"""What has ``synchronize()``, such as an event of torch or CuPy, or a function without arguments that waits."""


class Slot(Handle):
    """Blocks that are reserved, for one other node to push into, or several. Its outcome comes within `ttl_s`."""

    def __init__(
        self,
        handoff: NativeHandoff,
        node: Node,
        *,
        title: str,
        lasts_s: float,
        ticket: dict[str, Any],
        contacts: Sequence[Contact] = (),
    ) -> None:
        super().__init__(handoff, node, title=title, lasts_s=lasts_s)
        self._ticket = ticket
        self._contacts = contacts

    @property
    def ticket(self) -> dict[str, Any]:
        """What the other node needs to push: JSON-safe, for any router to carry. A fresh copy."""
        copied = {**self._ticket, "target": dict(self._ticket["target"]), "groups": list(self._ticket["groups"])}
        if "sources" in copied:
            copied["sources"] = [dict(source) for source in copied["sources"]]
        return copied

    def announce(self, address: str, *, key: str, deadline_s: float = 5.0) -> Announcement:
        """Bring the ticket to the node at `address`, for its ``expect(key)``; see ``Node.announce``."""
        return self._node.announce(self._ticket, address, key=key, deadline_s=deadline_s)

    @property
    def payload(self) -> bytes:
        """The small bytes that the push was committed with; of several sources, the first that was named.

        Raises
        ------
        KvlinkError
            The leaf that the reservation failed with.
        InvalidArgument
            If there is no outcome yet.
        """
        return self._payload()

    def _explain(
        self, cause: tuple[str, str], failed: tuple[FailedRange, ...], valid_prefix_tokens: int
    ) -> KvlinkError:
        found = [contact.error for contact in self._contacts]
        return explain_mismatch(super()._explain(cause, failed, valid_prefix_tokens), found)


class Push(Handle):
    """Blocks on their way into another node's reservation. Its outcome comes within `deadline_s`.

    The bytes of what was said to be ready must not change before ``released``.
    """

    def __init__(
        self,
        handoff: NativePush,
        node: Node,
        *,
        title: str,
        lasts_s: float,
        reservation: Reservation,
        groups: Sequence[Group],
        most_payload_bytes: int,
        call: Call,
    ) -> None:
        super().__init__(handoff, node, title=title, lasts_s=lasts_s)
        self._push = handoff
        self._reservation = reservation
        self._groups = groups
        self._most_payload_bytes = most_payload_bytes
        self._call = call
        self._fences = _Fences(handoff, title=title)

    @property
    def id(self) -> str:
        """``<epoch>-<sequence>`` of the reservation: the same on both sides."""
        return self._reservation.reservation

    @property
    def ticket(self) -> dict[str, Any]:
        """What it pushes into, for the other nodes that the reservation names. A fresh copy."""
        copied: dict[str, Any] = msgspec.to_builtins(self._reservation)
        return copied

    @property
    def target(self) -> str:
        """Name of the node that has reserved."""
        return self._reservation.target.name

    @property
    def num_tokens(self) -> int:
        """Tokens that are reserved."""
        return self._reservation.num_tokens

    @property
    def skip_tokens(self) -> int:
        """The first of them that the other side has already: they are not moved."""
        return self._reservation.skip_tokens

    def add(self, blocks: Blocks) -> None:
        """Add blocks, which follow those of before: as chunked prefill allocates them. Does not block.

        Raises
        ------
        InvalidArgument
            If a block is out of range or in the push already, or it was committed.
        BlocksBusy
            If a pull is writing one of the blocks.
        KvlinkError
            What the push has failed with.
        """
        tables = block_tables(
            blocks,
            self._groups,
            num_tokens=self._reservation.num_tokens,
            operation=f"add to {self._title}",
            partial=True,
        )
        self._push.add(tables)

    def ready(
        self, *, layers: Sequence[str] | None = None, tokens: range | None = None, fence: Fence | None = None
    ) -> None:
        """Say that `layers`, or all, are computed for `tokens`, or all: they may move now. Does not block.

        `fence` is waited for on another thread first, such as an event that was recorded behind the kernel
        which writes them; if it raises, the push fails with ``TransportFailed``. State, which a request has
        as a whole, is ready with its last token.

        Raises
        ------
        InvalidArgument
            If some of it is ready already or out of range, its blocks were not added yet, a layer is unknown, or
            the push was committed. Nothing moves then.
        KvlinkError
            What the push has failed with.
        """
        called = f"ready of {self._title}"
        if isinstance(layers, str) or (layers is not None and not layers):
            raise InvalidArgument(f"{called}: layers must be a list of names, or None for all, not {layers!r}")
        first, end = _bounds(tokens, self._reservation.num_tokens, called)
        wait = None if fence is None else _waiter(fence, called)
        number = self._push.hold_back([] if layers is None else list(layers), first, end)
        if wait is None:
            self._push.announce(number)
        else:
            self._fences.add(wait, number)

    def commit(self, payload: bytes | bytearray | memoryview = b"") -> None:
        """Say that everything is computed, what no ``ready`` has named too; nothing can be added any more.

        What a fence is waited for goes when that has come. `payload` reaches the other side with success.

        Raises
        ------
        InvalidArgument
            If blocks are missing for some of the tokens, the payload is too large, or it was committed before.
        KvlinkError
            What the push has failed with.
        """
        self._push.commit(
            check_payload(payload, most_bytes=self._most_payload_bytes, called=f"commit {self._title}: payload")
        )

    def _explain(
        self, cause: tuple[str, str], failed: tuple[FailedRange, ...], valid_prefix_tokens: int
    ) -> KvlinkError:
        return explain_mismatch(super()._explain(cause, failed, valid_prefix_tokens), [self._call.error])


class _Fences:
    """Waits for the fences of one push, in their order, on a thread that lives as long as there are some."""

    def __init__(self, push: NativePush, *, title: str) -> None:
        self._push = push
        self._title = title
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[], object], int]] = deque()
        self._is_running = False

    def add(self, wait: Callable[[], object], number: int) -> None:
        """Announce `number` once `wait` has returned."""
        with self._lock:
            self._waiting.append((wait, number))
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="kvlink-fence", daemon=True).start()
        except RuntimeError as error:  # the operating system's limit on threads
            self._fail(error)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or self._push.outcome is not None:
                    self._waiting.clear()
                    self._is_running = False
                    return
                wait, number = self._waiting.popleft()
            try:
                wait()
            except Exception as error:  # noqa: BLE001 - the user's: whatever it is, the push is told
                self._fail(error)
                continue
            with suppress(KvlinkError):  # The node was closed, and the push has its outcome.
                self._push.announce(number)

    def _fail(self, error: Exception) -> None:
        with suppress(KvlinkError):
            self._push.fail(code="TransportFailed", message=f"a fence has failed: {type(error).__name__}: {error}")


def _waiter(fence: Fence, called: str) -> Callable[[], object]:
    wait = getattr(fence, "synchronize", fence)
    if not callable(wait):
        raise InvalidArgument(f"{called}: fence must have synchronize(), or be a function, not {type(fence).__name__}")
    return cast("Callable[[], object]", wait)


def _bounds(tokens: range | None, num_tokens: int, called: str) -> tuple[int, int]:
    if tokens is None:
        return 0, num_tokens
    if not isinstance(tokens, range) or tokens.step != 1:
        raise InvalidArgument(f"{called}: tokens must be a range with step 1, or None for all, not {tokens!r}")
    if not 0 <= tokens.start <= tokens.stop <= num_tokens:
        raise InvalidArgument(f"{called}: tokens are {tokens}, outside [0, {num_tokens}]")
    return tokens.start, tokens.stop
