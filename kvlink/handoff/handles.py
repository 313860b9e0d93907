"""What users hold of one handoff."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvlink.errors import (
    DeadlineExceeded,
    FailedRange,
    InvalidArgument,
    KvlinkError,
    LayoutMismatch,
    error_class,
)
from kvlink.handoff.ticket import copy_of

if TYPE_CHECKING:
    from kvlink.handoff.gather import Contact
    from kvlink.handoff.native import NativeHandoff
    from kvlink.handoff.node import Node

__all__ = ["Handle", "Offer", "Pull", "explain_mismatch"]

# The native wait cannot be interrupted: Ctrl-C is answered between two slices.
_SLICE_S = 0.2
# The outcome comes by the handoff's own deadline; who waits without a timeout waits a little longer.
_GRACE_S = 1.0

_H = TypeVar("_H", bound="Handle")


class Handle:
    """One handoff from one side. Thread-safe; keeps its node alive.

    There are two events, each exactly once. The *outcome* is success or a typed error, by the
    deadline. *Released* means that nothing will write these blocks any more, and nothing read
    from them can be reported right any more: only then may the blocks be used for something else.
    """

    def __init__(self, handoff: NativeHandoff, node: Node, *, title: str, lasts_s: float) -> None:
        self._handoff = handoff
        self._node = node
        self._title = title
        self._ends_at = time.monotonic() + lasts_s

    def __repr__(self) -> str:
        """Name the handoff and its state."""
        return f"<{self._title}: {self.state}>"

    @property
    def id(self) -> str:
        """``<epoch>-<sequence>``, unique over all nodes and restarts; the same on both sides."""
        return f"{self._handoff.epoch.hex()}-{self._handoff.sequence}"

    @property
    def label(self) -> str:
        """The user's own name for it."""
        return self._handoff.label

    @property
    def state(self) -> str:
        """Where it stands, as a word for people."""
        return self._handoff.state

    @property
    def outcome(self) -> str | None:
        """``"succeeded"``, ``"failed"``, or ``None`` while there is no outcome."""
        return self._handoff.outcome

    @property
    def released(self) -> bool:
        """Whether the blocks may be used for something else."""
        return self._handoff.released

    @property
    def error(self) -> KvlinkError | None:
        """Why it failed; ``None`` while there is no outcome and after success."""
        if self._handoff.outcome != "failed":
            return None
        cause = self._handoff.error or ("TransportFailed", "no cause was recorded")
        return self._explain(cause, self.failed, self._handoff.valid_prefix_tokens)

    @property
    def failed(self) -> tuple[FailedRange, ...]:
        """What did not arrive of a pull that failed: all that it asked for and that no source has confirmed.

        Empty for offers, after success, and while there is no outcome. Holes and skipped tokens were not asked for.
        """
        return tuple(FailedRange(*one) for one in self._handoff.failed)

    def _payload(self) -> bytes:
        if not self.poll():
            raise InvalidArgument(f"payload of {self._title}: there is no outcome yet, wait for it first")
        return self._handoff.payload

    @property
    def bytes(self) -> int:
        """Bytes of KV cache moved; of what is converted, in the source's dtype."""
        return self._handoff.bytes

    @property
    def lane(self) -> str:
        """How the bytes moved; empty before they do."""
        return self._handoff.lane

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds spent in each phase of a pull, once there is an outcome; an offer has none."""
        return dict(self._handoff.phases_s)

    def poll(self) -> bool:
        """Return whether it has succeeded. Never blocks.

        Raises
        ------
        KvlinkError
            The leaf that it failed with.
        """
        error = self.error
        if error is not None:
            raise error
        return self._handoff.outcome is not None

    def wait(self: _H, *, timeout_s: float | None = None) -> _H:
        """Block until the outcome, and return this handle if it is success.

        Without `timeout_s`, for as long as the handoff itself may take.

        Raises
        ------
        KvlinkError
            The leaf that it failed with.
        DeadlineExceeded
            If `timeout_s` passed without an outcome; then the handoff goes on.
        """
        if not self._wait(self._handoff.wait, timeout_s):
            raise DeadlineExceeded(f"wait for {self._title}: no outcome within the timeout, it is {self.state} still")
        self.poll()
        return self

    def wait_released(self, *, timeout_s: float | None = None) -> bool:
        """Block until the blocks may be used for something else; return whether that is so."""
        return self._wait(self._handoff.wait_released, timeout_s)

    def __await__(self: _H) -> Generator[Any, None, _H]:
        """Wait for the outcome in an asyncio loop, as ``wait`` does; several tasks may.

        Cancelling the task that awaits does not cancel the handoff.
        """
        return self._outcome().__await__()

    async def until_released(self) -> None:
        """Wait in an asyncio loop until the blocks may be used for something else."""
        await self._node.until_event(lambda: self._handoff.released)

    def cancel(self) -> None:
        """Ask to end it. Idempotent and harmless in every state; the outcome tells what came of it."""
        self._node.check_usable("cancel", closed_too=False)
        self._handoff.cancel()

    def _explain(
        self, cause: tuple[str, str], failed: tuple[FailedRange, ...], valid_prefix_tokens: int
    ) -> KvlinkError:
        name, message = cause
        return error_class(name)(message, failed=failed, valid_prefix_tokens=valid_prefix_tokens)

    async def _outcome(self: _H) -> _H:
        await self._node.until_event(lambda: self._handoff.outcome is not None)
        self.poll()
        return self

    def _wait(self, wait: Any, timeout_s: float | None) -> bool:
        self._node.check_usable("wait", closed_too=False)
        until = self._ends_at + _GRACE_S if timeout_s is None else time.monotonic() + timeout_s
        while True:
            remaining_s = until - time.monotonic()
            if wait(timeout_s=max(0.0, min(remaining_s, _SLICE_S))):
                return True
            if remaining_s <= _SLICE_S:
                return False


class Offer(Handle):
    """Blocks that others may read. Its outcome is success once as many as ``readers`` have read them.

    The bytes must not change between ``Node.offer`` and ``released``.
    """

    def __init__(
        self, handoff: NativeHandoff, node: Node, *, title: str, lasts_s: float, ticket: dict[str, Any]
    ) -> None:
        super().__init__(handoff, node, title=title, lasts_s=lasts_s)
        self._ticket = ticket

    @property
    def ticket(self) -> dict[str, Any]:
        """What a reader needs to pull: JSON-safe, for any router to carry. A fresh copy."""
        return copy_of(self._ticket)


class Pull(Handle):
    """Blocks that are being filled from the offers of one ticket, by one source or several."""

    def __init__(
        self, handoff: NativeHandoff, node: Node, *, title: str, lasts_s: float, contacts: Sequence[Contact] = ()
    ) -> None:
        super().__init__(handoff, node, title=title, lasts_s=lasts_s)
        self._contacts = contacts

    @property
    def payload(self) -> bytes:
        """The small bytes that came with the KV cache: first token, log probabilities and the like.

        Of several sources, the first that the ticket names.

        Raises
        ------
        KvlinkError
            The leaf that the pull failed with.
        InvalidArgument
            If there is no outcome yet.
        """
        return self._payload()

    def _explain(
        self, cause: tuple[str, str], failed: tuple[FailedRange, ...], valid_prefix_tokens: int
    ) -> KvlinkError:
        found = [contact.error for contact in self._contacts]
        return explain_mismatch(super()._explain(cause, failed, valid_prefix_tokens), found)


def explain_mismatch(error: KvlinkError, found: Sequence[KvlinkError | None]) -> KvlinkError:
    """Return `error`; if it is about layouts, with the values that were `found` not to fit while connecting.

    The native core carries a class and a text.
    """
    if isinstance(error, LayoutMismatch):
        for one in found:
            if isinstance(one, LayoutMismatch):
                error.field, error.source_value, error.target_value = one.field, one.source_value, one.target_value
    return error
