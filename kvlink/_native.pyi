"""
The native core of kvlink. Private: the public names are those of the kvlink package.
"""

from builtins import bytes as Bytes
from collections.abc import Sequence
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray


class Template:
    """
    The copies of one block pair, for everything that both sides hold. Immutable.

    Made by ``kvlink.plan.compile_template``.
    """

    def __init__(self, *, ops: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]], groups: Sequence[tuple[str, Sequence[int]]], layers: Sequence[str], source_region_bytes: Sequence[int], target_region_bytes: Sequence[int]) -> None:
        """
        Check and keep the numbers.

        An op is ``((group, layer, component, first_head, heads, dims, element_bytes), source, target)``; a side is
        ``(region, offset, block_stride, token_stride, head_stride, dim_stride)``; a group is ``(name,
        (source_index, target_index, source_block_tokens, target_block_tokens, source_num_blocks,
        target_num_blocks, window, slots, target_block_pool))``, without the last two where blocks hold tokens and
        are the group's own. Raises ``InvalidArgument`` for whatever does not fit its region.
        """

    @property
    def layers(self) -> list[str]:
        """Global layer names, by the index that ops use."""

    @property
    def groups(self) -> list[str]:
        """Names of the groups, in the target's order."""

    @property
    def op_count(self) -> int:
        """Number of ops."""

    def token_bytes(self, group: str) -> int:
        """
        Bytes that one token of a group, or one slot, has in all layers together.
        """

class Plan:
    """
    The copies of one request, seen as one stream of bytes. Immutable.

    Nodes make their own; this is for tests and benchmarks.
    """

    def __init__(self, template: Template, source_tables: Sequence[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], target_tables: Sequence[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], *, first_token: int = 0, end_token: int) -> None:
        """
        Pair the block tables, one a group in the template's order, for tokens ``[first_token, end_token)``.

        Raises ``InvalidArgument`` for blocks out of range, twice in a target or missing, and ``NotOffered``
        for a hole of the source that the target wants.
        """

    @staticmethod
    def one_sided(template: Template, plan: Plan, side: str) -> Plan:
        """
        Return the same plan as the process of one side knows it: the other side's blocks are left out.
        """

    @property
    def total_bytes(self) -> int:
        """Length of the stream."""

    def copies(self, begin: int = 0, end: int = 18446744073709551615, *, packed: str = '') -> Annotated[NDArray[numpy.uint64], dict(shape=(None, None))]:
        """
        List the copies of ``[begin, end)`` as rows of source region, target region, source offset, target offset,
        run bytes, inner, outer, and the inner and outer strides of source and target.

        `packed` names the side that is the packed stream instead of memory, if any.
        """

    def count_copies(self, begin: int = 0, end: int = 18446744073709551615) -> tuple[int, int, int]:
        """
        Visit ``[begin, end)`` as a lane would and return the number of copies, of runs, and a checksum.
        """

    def describe(self, begin: int, end: int) -> list[tuple[str, str, str, int, int, int, int]]:
        """
        Return ``(group, layer, component, first_head, end_head, first_token, end_token)`` of what lies in
        ``[begin, end)``.
        """

    def valid_prefix_tokens(self, missing: Sequence[tuple[int, int]], *, num_tokens: int) -> int:
        """
        Return how many tokens from the start are right although the ranges `missing` did not arrive.
        """

class Conversion:
    """
    What becomes of elements that arrive in another dtype. Immutable.

    Made by ``kvlink.plan.compile_conversion``.
    """

    def __init__(self, *, template: Template, pairs: Sequence[tuple[str, str]], scratch_bytes: int) -> None:
        """Check and keep the numbers. See ``csrc/kvlink/plan/conversion.hpp``."""

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch memory of one part."""

    def steps(self, template: Template, plan: Plan) -> tuple[Plan, Plan]:
        """
        Return the plan that moves what `plan` asks for into scratch memory, and the one that converts it.
        """

    def run(self, plan: Plan, regions: Sequence[tuple[int, int]]) -> None:
        """
        Execute the second plan at once, in `regions` of (address, nbytes): those of the target and scratch
        memory behind them. Nodes do that on their copy threads; this is for tests.
        """

def convert_elements(source: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], target: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], pair: tuple[str, str], *, plainly: object = False) -> None:
    """
    Convert bytes that hold elements of the first dtype of `pair` to the second; `plainly`: without what the CPU
    has for it. For tests and benchmarks.
    """

class Pool:
    """Memory that other processes of the host can map: one sealed memfd."""

    @property
    def address(self) -> int:
        """First byte, in this process."""

    @property
    def nbytes(self) -> int:
        """Size of the whole allocation."""

    def open_read_only(self) -> int:
        """
        Return a new descriptor that cannot be mapped writable; the caller closes it.

        Raises OutOfMemory without a free descriptor, LaneUnavailable where the kernel can give no such promise.
        """

def pool_of(address: int) -> Pool | None:
    """Return the live pool that contains `address`."""

def copied_bytes() -> int:
    """Return how many bytes the copy loops of this process have written."""

class PoolBuffer:
    """One pool as a packed, writable array, by the buffer protocol."""

    def __init__(self, shape: Sequence[int], *, element_bytes: int, format: str) -> None:
        """Allocate it, zero-filled. Raises InvalidArgument and OutOfMemory."""

    @property
    def pool(self) -> Pool:
        """The pool behind it."""

def dlpack_view(*, address: int, shape: list[int], element: tuple[int, int], lanes: int, device: tuple[int, int], owner: object) -> Any:
    """
    Return a carrier of DLPack capsules over memory that `owner` keeps alive.

    `element` is DLPack's (type code, bits), `device` its (device type, device id).
    """

class UcxContext:
    """One UCX context: the transports and devices that a node may use."""

    def __init__(self, *, library_path: str, settings: Sequence[tuple[str, str]], one_sided: bool) -> None:
        """
        Load `library_path` (once a process) and open a context.

        `settings` are UCX's own, without ``UCX_``; variables that the user has set win over them.

        Raises UcxUnavailable if the library cannot be used or refuses the settings.
        """

    @property
    def version(self) -> str:
        """UCX's version."""

    @property
    def library_path(self) -> str:
        """The libucp file in use."""

    @property
    def one_sided(self) -> bool:
        """Whether peers may read registered memory."""

    @property
    def overruled(self) -> list[str]:
        """UCX_ variables that won over kvlink's settings."""

    def describe(self) -> str:
        """
        Return what UCX prints about its memory domains, transports and devices.
        """

    def transports_to(self, other: UcxContext, *, same_host: bool) -> str:
        """
        Return the transports between two workers of these contexts, such as ``"cma/memory posix/memory"``.

        Raises LaneUnavailable if there are none.
        """

def ucx_log() -> list[str]:
    """Return UCX's latest errors and warnings, oldest first."""

def copy_block_table(given: object, into: object, *, num_blocks: int, called: str) -> None:
    """
    Copy the first entries of a list, a tuple, a range or an array of int32 into the array of int32 `into`.

    Raises ``InvalidArgument`` for something that is no block id, and for a block out of range or twice in
    `into`; `called` is what the message calls the table.
    """

class Engine:
    """The native node. Thread-safe; every call but `close` returns at once."""

    def __init__(self, *, epoch: bytes, groups: Sequence[tuple[str, int, int, int, bool, int]], regions: Sequence[tuple[int, int]], ucx: UcxContext | None, copy_threads: int, max_handoffs: int, lease_cap_ms: int, windows: tuple[int, int], max_quarantined_blocks: int, own_template: Template | None, bells_of: Engine | None = None) -> None:
        """
        Start the threads. `regions` are (address, nbytes), borrowed until `close` has returned. `windows` are the bytes that may be on their way here, from one peer and from all. `own_template` pairs the cache with itself. `bells_of` is the engine before this one.
        """

    def close(self, *, deadline_s: float, code: str = 'Closed', message: str = 'the node is closed') -> None:
        """
        Fail what lives with this class and message, wait for transfers to drain, end the threads. Idempotent.
        """

    def refuse_new(self, *, code: str, message: str) -> None:
        """
        Refuse offers, pulls and claims of what was not offered here with this class and message.
        """

    def accept_new(self) -> None:
        """Take offers, pulls and claims again."""

    def reserve(self, sources: Sequence[tuple[int, bytes]], *, blocks: Sequence[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], num_tokens: int, skip_tokens: int, ttl_ms: int, lane: str, integrity: str = '', label: str) -> Handoff:
        """
        Hold blocks to be pushed into: by whoever comes first, or by each of `sources`, which are peers and their epochs. `lane` and `integrity` as of a pull.
        """

    def push(self, reservation: tuple[bytes, int], *, blocks: Sequence[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], num_tokens: int, deadline_ms: int, at_once: bool, integrity: str = '', label: str) -> Push:
        """
        Push into the reservation of this (epoch, sequence). `blocks` are those that there are by now. With `at_once` nothing moves before it is committed.
        """

    def fileno(self) -> int:
        """
        Return an eventfd that becomes readable with every outcome and release.
        """

    def wake_fd(self) -> int:
        """
        Return a second such eventfd, for the dispatcher of awaiting coroutines.
        """

    def ucx_address(self) -> bytes:
        """Return the UCX worker's address; empty without UCX."""

    def pack_keys(self) -> list[bytes]:
        """
        Return one packed remote key a region; empty where memory is not offered to one-sided reads.
        """

    def expect_peer(self, *, address: str) -> int:
        """
        Return the number of a peer that Python will connect; pulls may be queued on it at once.
        """

    def attach_source(self, peer: int, *, fd: int, dialect: int, epoch: bytes, name: str, template: Template, conversion: Conversion | None, region_bytes: Sequence[int], region_addresses: Sequence[int], region_fds: Sequence[int], pid: int, keys: Sequence[bytes], ucx_address: bytes, same_host: object, lanes: Sequence[str]) -> list[str]:
        """
        Connect an expected peer. Takes all descriptors over, also when it raises. Return usable lanes.
        """

    def attach_claimant(self, *, fd: int, dialect: int, epoch: bytes, name: str, address: str, template: Template, ucx_address: bytes, same_host: object) -> int:
        """Connect a peer that dialled. Takes `fd` over. Return its number."""

    def fail_peer(self, peer: int, *, code: str, message: str) -> None:
        """
        End a connection, or an attempt at one; what lives on it fails with this error class and message.
        """

    def is_peer_lost(self, peer: int) -> bool:
        """Return whether the connection, or the attempt at one, is over. Cheap."""

    def peers(self) -> list[dict[str, Any]]:
        """Return how each peer stands."""

    def holds(self) -> dict[str, int]:
        """Return how many blocks and handoffs are held."""

    def counters(self) -> dict[str, int]:
        """Return the engine's counters."""

    def offer(self, *, blocks: Sequence[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], num_tokens: int, ttl_ms: int, retry_ms: int | None = None, readers: int, payload: bytes, label: str, integrity: str = '', minted: tuple[bytes, int] | None = None) -> Handoff:
        """
        Offer blocks to be read. `integrity` names the checksum for readers that demand none. `minted` is the (epoch, sequence) of a ticket made elsewhere.
        """

    def pull(self, sources: Sequence[tuple[int, bytes, int]], *, blocks: Sequence[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]], num_tokens: int, skip_tokens: int, deadline_ms: int, lane: str, integrity: str = '', ranks: int = 1, label: str) -> Handoff:
        """
        Read an offer's blocks from its sources, each a (peer, epoch, sequence). `lane` may be empty: each peer's best. `integrity`, if not empty, is demanded of every source. `ranks` nodes pull as one reader.
        """

class Completions:
    """Events of submitted handoffs, until they are taken. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        """Ring the bells that `engine` rings."""

    def add_ended(self, token: int) -> None:
        """Add both events of something that never started."""

    def take(self, most: int, *, resets_bell: bool) -> list[tuple[int, bool]]:
        """
        Return the oldest events as (token, whether it is the release). With `resets_bell`, `Engine.fileno` is read empty, and stays readable if there are more.
        """

class Handoff:
    """One handoff of this node. Thread-safe."""

    @property
    def epoch(self) -> Bytes: ...

    @property
    def sequence(self) -> int: ...

    @property
    def attempt(self) -> int: ...

    @property
    def label(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def outcome(self) -> str | None: ...

    @property
    def ended(self) -> tuple[Any, ...] | None: ...

    @property
    def released(self) -> bool: ...

    @property
    def error(self) -> tuple[str, str] | None: ...

    @property
    def failed(self) -> list[tuple[str, str, str, int, int, int, int]]: ...

    @property
    def valid_prefix_tokens(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def lane(self) -> str: ...

    @property
    def phases_s(self) -> dict[str, float]: ...

    @property
    def payload(self) -> Bytes: ...

    def report_to(self, completions: Completions, token: int) -> None:
        """Have both events put there, also those that have come already."""

    def cancel(self) -> None: ...

    def wait(self, *, timeout_s: float) -> bool:
        """Wait for the outcome; return whether it has come."""

    def wait_released(self, *, timeout_s: float) -> bool:
        """Wait until the blocks are released; return whether they are."""

class Push(Handoff):
    """One push of this node. Thread-safe; nothing waits."""

    def start(self, peer: int) -> None:
        """Push to this claimant, who has reserved, now that it is connected."""

    def fail(self, *, code: str, message: str) -> None:
        """Fail it with this error class and message."""

    def add(self, blocks: Sequence[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]]) -> None:
        """Hold more blocks, which follow those of before."""

    def hold_back(self, layers: Sequence[str], first: int, end: int) -> int:
        """
        Say that these layers, or all, will be ready for these tokens, once the number is announced.
        """

    def announce(self, number: int) -> None:
        """Say that what was held back under this number is ready."""

    def commit(self, payload: bytes) -> None:
        """
        Say that all is ready, but for what is held back, and that nothing more comes.
        """

def checksum(algorithm: str, pieces: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]]) -> int:
    """Return the checksum of pieces, as if they were one."""

def crc32c_by_tables(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """Return a CRC-32C made without the processor's instruction."""

def sum_plan(plan: Plan, regions: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]], *, target: bool, algorithm: str, threads: int) -> bytes:
    """
    Return the checksums of all cells of one side of a plan, one after the other.
    """

def describe_cells(plan: Plan, *, target: bool, cells: Sequence[int]) -> list[tuple[str, str, str, int, int, int, int]]:
    """Return what these cells are, as `Plan.describe` does."""

class FaultCounts:
    """What came of one script. Outlives the node."""

    def read(self) -> dict[str, int]:
        """Return the counts by name."""

def inject_faults(engine: Engine, *, seed: int, delay_ms: float, drop: float, duplicate: float, corrupt: float, reorder: bool, fail_after_bytes: int | None, no_resource: int, like_rc: bool, error_after_ms: float) -> FaultCounts:
    """
    For tests: make the transfers that start from now on go wrong by this script.
    """

def remove_faults(engine: Engine) -> None:
    """For tests: transfers that start from now on go right again."""

def memcpy_seconds(*, source: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], target: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], source_offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], target_offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], run_bytes: int) -> float:
    """
    Copy scattered runs with the C library's memcpy on this thread and return the seconds it took.

    Raises InvalidArgument if a run leaves its pool, or the two lists differ in length.
    """

def send_runs(*, socket: int, pool: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], run_bytes: int) -> None:
    """
    Write scattered runs in order to a connected socket, by writev. The socket's own timeouts bound it.

    Raises InvalidArgument if a run leaves the pool, DeadlineExceeded after a timeout, or PeerLost.
    """

def receive_runs(*, socket: int, pool: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], run_bytes: int) -> None:
    """
    Read scattered runs in order from a connected socket, by readv. The socket's own timeouts bound it.

    Raises InvalidArgument if a run leaves the pool, DeadlineExceeded after a timeout, or PeerLost.
    """
