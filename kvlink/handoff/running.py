"""The running parts of a node: started together, closed together, whatever happens in between."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from kvlink.config import Limits
from kvlink.errors import (
    Closed,
    DeadlineExceeded,
    InvalidArgument,
    KvlinkError,
    NotReady,
    OutOfMemory,
    UnsupportedMemory,
)
from kvlink.handoff.accept import Acceptor
from kvlink.handoff.address import listen_on
from kvlink.handoff.answer import Answerer
from kvlink.handoff.awaiting import Awaiters
from kvlink.handoff.call import CALL_BACK, answer_call
from kvlink.handoff.data_host import data_host
from kvlink.handoff.handshake import Keyring, Secrets
from kvlink.handoff.life import Life, new_epoch, whole_pool
from kvlink.handoff.native import NativeEngine
from kvlink.handoff.pool_socket import PoolSocket
from kvlink.handoff.rendezvous import ANNOUNCE, Rendezvous
from kvlink.memory import pool_of
from kvlink.transport import open_ucx

if TYPE_CHECKING:
    from kvlink.layout import CacheLayout, KVCache
    from kvlink.plan import Conversions

__all__ = ["NodeSettings", "Running"]

_live: weakref.WeakSet[Running] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What the user chose, checked."""

    name: str
    listen: str
    advertise: str | None
    secrets: Secrets = field(repr=False)
    lanes: tuple[str, ...]
    copy_threads: int
    limits: Limits
    converts: Conversions


class Running:
    """Owns the sockets and threads of one node, and its lives: one after another, with gaps while suspended.

    Apart from ``Node``, so that no thread keeps a forgotten node alive: when the last reference to
    the node and its handles goes, or the interpreter exits, this is closed.

    Attributes
    ----------
    life
        The present life; the last one while suspended, whose calls raise ``NotReady``.
    keyring
        The secrets that are valid now.
    answerer
        Knows who answers what peers ask.
    rendezvous
        The tickets that peers have announced, and those that are expected.
    """

    def __init__(self, cache: KVCache, settings: NodeSettings) -> None:
        self.closed = False
        self._settings = settings
        self._process = os.getpid()
        self._suspended = False
        self._draining = False
        # Re-entrant, like every lock on the way of `close`: the garbage collector may close a
        # forgotten node in the middle of anything that any thread does.
        self._closing = threading.RLock()
        self._changing = threading.RLock()  # one drain, suspend or resume at a time decides; before _closing
        with contextlib.ExitStack() as undo:
            try:
                self._start(cache, undo)
            except OSError as error:
                if isinstance(error, KvlinkError):  # some are, so that they can be caught as the builtin
                    raise
                advice = "; raise the limit on open files (ulimit -n)" if error.errno == errno.EMFILE else ""
                raise OutOfMemory(f"start the node {settings.name}: {error.strerror}{advice}") from error
            undo.pop_all()
        _live.add(self)

    def _start(self, cache: KVCache, undo: contextlib.ExitStack) -> None:
        """Acquire everything; `undo` learns what to give back should a later step fail."""
        settings = self._settings
        self.keyring = Keyring(settings.secrets)
        listener, self.address = listen_on(
            settings.listen, advertise=settings.advertise, has_secret=settings.secrets != (b"",)
        )
        undo.callback(listener.close)
        self._listen_host = data_host(listener.getsockname()[0], self.address)
        self._pool_socket = PoolSocket()
        undo.callback(self._pool_socket.close)
        self.life = self._new_life(cache, before=None)
        self._counted: tuple[Counter[str], NativeEngine] = (Counter(), self.life.engine)  # ended lives, and the last
        undo.callback(self.life.engine.close, deadline_s=0.0)
        self.awaiters = Awaiters(self.life.engine.wake_fd())
        undo.callback(self.awaiters.close)
        self.answerer = Answerer(name=settings.name, limits=settings.limits)
        self.rendezvous = Rendezvous(name=settings.name)
        self.answerer.register(ANNOUNCE, self.rendezvous.answer)
        self.answerer.register(CALL_BACK, lambda question: answer_call(question, self.life.dialer))
        self.acceptor = Acceptor(
            self.life,
            listener=listener,
            pools=self._pool_socket,
            keyring=self.keyring,
            answerer=self.answerer,
            limits=settings.limits,
        )

    def _new_life(self, given: KVCache, *, before: NativeEngine | None) -> Life:
        cache = given.within_allocations(pool_of)
        if any(region.kind != "host" for region in cache.regions):
            raise UnsupportedMemory("node: a cache in GPU memory cannot be handed over by this version")
        settings, epoch = self._settings, new_epoch()
        engine = start_engine(cache, epoch, settings, listen_host=self._listen_host, before=before)
        try:
            life = Life(
                given,
                cache,
                epoch=epoch,
                name=settings.name,
                address=self.address,
                engine=engine,
                keyring=self.keyring,
                lanes=settings.lanes,
                limits=settings.limits,
                converts=settings.converts,
            )
        except BaseException:
            engine.close(deadline_s=0.0)
            raise
        self._pool_socket.lend([whole_pool(region) for region in cache.regions])
        return life

    def check_usable(self, operation: str, *, closed_too: bool = True) -> None:
        """Refuse in a forked child and, where `closed_too`, after ``close``.

        Raises
        ------
        Closed
            The message says which of the two it is.
        """
        if os.getpid() != self._process:
            raise Closed(
                f"{operation}: this process is a fork of the one that made the node, and the node's threads stayed "
                "there: make nodes after the fork, or start processes by spawn"
            )
        if closed_too and self.closed:
            raise Closed(f"{operation}: the node is closed")

    @property
    def max_handoffs(self) -> int:
        """How many may live at once."""
        return self._settings.limits.max_handoffs

    @property
    def name(self) -> str:
        """What peers and messages call the node."""
        return self._settings.name

    @property
    def state(self) -> str:
        """See ``Node.state``."""
        if self.closed:
            return "closed"
        if self._suspended:
            return "suspended"
        if self._draining:
            return "draining"
        quarantined = self.life.engine.holds()["quarantined"]
        return "quarantined" if quarantined > self._settings.limits.quarantined_blocks else "ready"

    def ring(self) -> None:
        """Tell engines and awaiting coroutines of an event that is not the native core's."""
        engine = self.life.engine  # Its bells exist for as long as it does, closed or not.
        with contextlib.suppress(OSError):
            os.eventfd_write(engine.fileno(), 1)
            os.eventfd_write(engine.wake_fd(), 1)

    def ask(self, address: str, kind: str, body: bytes, *, deadline_s: float, epoch: bytes = b"") -> bytes:
        """Return what the node at `address` answers, see ``Asker.ask``. Waits: not for a user's thread."""
        return self.life.asker.ask(address, kind, body, deadline_s=deadline_s, epoch=epoch)

    def counters(self) -> dict[str, int]:
        """Return what was counted over all lives."""
        past, engine = self._counted
        return {key: count + past[key] for key, count in engine.counters().items()}

    def drain(self, deadline_s: float) -> None:
        """See ``Node.drain``."""
        with self._changing:
            if self._suspended:
                return
            life = self.life
            self._refuse_new(life, f"{self._settings.name} is being drained and takes nothing new: ask another node")
        left = life.wait_idle(until=time.monotonic() + deadline_s, called_off=lambda: self.closed)
        self.check_usable(f"drain {self._settings.name}")
        if any(left.values()):
            raise DeadlineExceeded(f"drain {self._settings.name}: after {deadline_s:g} s {_told(left)}")

    def suspend(self, deadline_s: float) -> None:
        """See ``Node.suspend``."""
        name, limits = self._settings.name, self._settings.limits
        with self._changing:
            if self._suspended:
                return
            life = self.life
            why = NotReady(f"{name} is suspended until its engine resumes it: ask another node, or later")
            self._refuse_new(life, str(why))
            life.wait_idle(until=time.monotonic() + deadline_s, called_off=lambda: self.closed)
            with self._closing:
                self.check_usable(f"suspend {name}")
                self.acceptor.stop_serving(why, deadline_s=limits.close_deadline_s)
                life.end(why, deadline_s=limits.close_deadline_s)
                life.forget_cache()
                self._pool_socket.lend([])
                self._suspended = True

    def resume(self, cache: KVCache | None) -> None:
        """See ``Node.resume``."""
        name = self._settings.name
        with self._changing, self._closing:
            self.check_usable(f"resume {name}")
            if not self._suspended:
                if cache is not None and cache is not self.life.given:
                    raise InvalidArgument(f"resume {name}: it has a cache; suspend it before it gets another one")
                self.life.engine.accept_new()
                self._draining = False
                return
            if cache is None:
                raise InvalidArgument(f"resume {name}: it is suspended, so pass the cache that it has from now on")
            past, ended = self._counted
            self.life = self._new_life(cache, before=ended)
            self._counted = (past + Counter(ended.counters()), self.life.engine)
            self._suspended = self._draining = False
            self.acceptor.serve(self.life)

    def close(self, deadline_s: float | None = None) -> None:
        """End everything; see ``Node.close``. Idempotent; a second caller waits for the first."""
        if os.getpid() != self._process:
            return  # The parent's node is none of this process's business.
        deadline_s = self._settings.limits.close_deadline_s if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        self.closed = True
        with self._closing:
            self.acceptor.close(deadline_s=deadline_s)
            why = Closed(f"the node {self._settings.name} is closed")
            self.rendezvous.close(why)
            self.life.end(why, deadline_s=max(0.0, until - time.monotonic()))
            self.awaiters.close()
            _live.discard(self)

    def abandon(self) -> None:
        """Let go in a forked child, where none of the threads exist.

        The engine's destructor would wait for its thread, so the child never runs it.
        """
        self.closed = True
        self.acceptor.close_sockets()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.life.engine))

    def _refuse_new(self, life: Life, message: str) -> None:
        self._draining = True
        with contextlib.suppress(Closed):  # then it takes nothing new anyway
            life.engine.refuse_new(code=NotReady.__name__, message=message)


def _told(left: dict[str, int]) -> str:
    return (
        f"{left['handoffs']} handoffs live still, which hold {left['shared']} blocks for readers and "
        f"{left['exclusive']} to write, {left['quarantined']} blocks are in quarantine: wait on, cancel them, "
        "or close the node"
    )


def _abandon_all() -> None:
    for running in list(_live):
        running.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _numbered(layout: CacheLayout) -> list[tuple[str, int, int, int, bool, int]]:
    """Return the groups as the native core takes them; those of one block pool have one number."""
    pools: dict[str, int] = {}
    numbered = []
    for index, group in enumerate(layout.groups):
        pool = pools.setdefault(group.block_pool, index) if group.block_pool is not None else index
        numbered.append((group.name, group.num_blocks, group.block_tokens, group.window or 0, group.slots, pool))
    return numbered


def start_engine(
    cache: KVCache, epoch: bytes, settings: NodeSettings, *, listen_host: str, before: NativeEngine | None
) -> NativeEngine:
    """Start the native core over the memory of `cache`, which must stay alive until it is closed.

    It rings the bells of the one `before`, if there was one, so that ``fileno`` stays what it is.
    """
    from kvlink import _native
    from kvlink.plan import compile_template

    layout, limits = cache.layout, settings.limits
    engine = _native.Engine(
        epoch=epoch,
        groups=_numbered(layout),
        regions=[(region.address, region.nbytes) for region in cache.regions],
        ucx=open_ucx(listen_host=listen_host),
        copy_threads=settings.copy_threads,
        max_handoffs=limits.max_handoffs,
        lease_cap_ms=int(limits.lease_cap_s * 1000),
        windows=(limits.peer_window_bytes, limits.node_window_bytes),
        max_quarantined_blocks=limits.quarantined_blocks,
        own_template=compile_template(layout, layout),
        bells_of=cast("_native.Engine | None", before),
    )
    return cast("NativeEngine", engine)  # the generated stub says `object` where this says more
