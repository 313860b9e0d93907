"""A process that used kvlink ends with its own exit code, whatever it left open."""

from __future__ import annotations

import pytest
from helpers.processes import run_python

SETUP = """
import asyncio, gc, os, signal, sys, threading, time
import numpy as np
import kvlink

def make(name, pool=True):
    memory = kvlink.empty((2, 8, 4, 2, 8), "float32") if pool else np.zeros((2, 8, 4, 2, 8), "float32")
    tensor = np.frombuffer(memory, dtype="float32").reshape(2, 8, 4, 2, 8)
    cache = kvlink.KVCache.from_tensors({"a": tensor}, axes="kv block token head dim", block_tokens=4)
    return kvlink.Node(cache, name=name)

def hand_over(source, target):
    offer = source.offer(blocks=[3, 1], num_tokens=7)
    pull = target.pull(offer.ticket, blocks=[0, 2], deadline_s=10)
    pull.wait(timeout_s=10)
    return offer, pull
"""

FORMS = {
    "closed": "a, b = make('a'), make('b'); kept = hand_over(a, b); b.close(); a.close()",
    "closed in the other order": "a, b = make('a'), make('b'); kept = hand_over(a, b); a.close(); b.close()",
    "closed twice": "a, b = make('a'), make('b'); hand_over(a, b); a.close(); a.close(); b.close(); b.close()",
    "with": "with make('a') as a, make('b') as b: hand_over(a, b)",
    "never closed": "a, b = make('a'), make('b'); hand_over(a, b)",
    "never closed, handles kept": "a, b = make('a'), make('b'); kept = hand_over(a, b)",
    "never closed, in a function": "def main():\n    a, b = make('a'), make('b')\n    hand_over(a, b)\nmain()",
    "never closed, numpy memory": "a, b = make('a', pool=False), make('b', pool=False); hand_over(a, b)",
    "deleted": "a, b = make('a'), make('b'); hand_over(a, b); del a, b; gc.collect()",
    "in a cycle": "a, b = make('a'), make('b'); hand_over(a, b); loop = [a, b]; loop.append(loop); del a, b, loop",
    "with a live offer": "a = make('a'); offer = a.offer(blocks=[1], num_tokens=4, ttl_s=100)",
    "with a live pull": """
a, b = make('a'), make('b')
ticket = a.offer(blocks=[1], num_tokens=4).ticket
a.close()
pull = b.pull(ticket, blocks=[1], deadline_s=100)
""",
    "with a thread that waits": """
a, b = make('a'), make('b')
hand_over(a, b)
offer = a.offer(blocks=[1], num_tokens=4, ttl_s=100)
began = threading.Event()
def wait():
    began.set()
    try:
        offer.wait(timeout_s=60)
    except kvlink.errors.Closed:
        pass
threading.Thread(target=wait, daemon=True).start()
began.wait(5)
""",
    "with a thread that waits meanwhile": """
class Lasting:
    def __del__(self, sleep=time.sleep):
        sleep(0.2)  # the interpreter is ending by now: the thread asks for its lock meanwhile
lasting = Lasting()
a = make('a')
offer = a.offer(blocks=[1], num_tokens=4, ttl_s=100)
began = threading.Event()
def wait():
    while True:
        try:
            offer.wait(timeout_s=0.001)
        except kvlink.KvlinkError:
            began.set()
threading.Thread(target=wait, daemon=True).start()
began.wait(5)
""",
    "with a thread that sleeps": """
a, b = make('a'), make('b')
kept = hand_over(a, b)
threading.Thread(target=lambda held: time.sleep(60), args=[(a, b, kept)], daemon=True).start()
""",
    "closed on another thread": """
a, b = make('a'), make('b')
hand_over(a, b)
closers = [threading.Thread(target=node.close) for node in (a, b, a, b)]
[closer.start() for closer in closers]
[closer.join(10) for closer in closers]
assert not any(closer.is_alive() for closer in closers)
""",
    "closed at exit by others": "import atexit\na, b = make('a'), make('b'); hand_over(a, b); atexit.register(b.close)",
    "only made": "a = make('a')",
    "only memory": "memory = kvlink.empty((16,), 'uint8')",
    "memory outlives the node": """
a, b = make('a'), make('b')
hand_over(a, b)
a.close(); b.close()
view = memoryview(kvlink.empty((16,), 'uint8'))
gc.collect()
view[0] = 7
assert view[0] == 7
""",
    "on an event loop": """
a, b = make('a'), make('b')
async def main():
    offer = a.offer(blocks=[3], num_tokens=4)
    await b.pull(offer.ticket, blocks=[0], deadline_s=10)
    await offer
asyncio.run(main())
""",
    "a failed constructor": """
a = make('a')
try:
    kvlink.Node(None, name='none')
except Exception:
    pass
""",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_the_process_exits_with_0_and_says_nothing(form: str) -> None:
    ended = run_python(SETUP + form)
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "")


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(7)", 7), ("raise SystemExit(3)", 3), ("raise ValueError('boom')", 1), ("os._exit(5)", 5)],
)
def test_the_process_keeps_its_own_exit_code(ending: str, code: int) -> None:
    ended = run_python(SETUP + "a, b = make('a'), make('b'); kept = hand_over(a, b)\n" + ending)
    assert ended.returncode == code, ended.stderr
    assert "leak" not in ended.stderr


def test_an_interrupted_process_ends_at_once() -> None:
    """Ctrl-C reaches a wait, which holds no lock of the interpreter."""
    waiting = """
offer = make('a').offer(blocks=[1], num_tokens=4, ttl_s=100)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    offer.wait(timeout_s=60)
except KeyboardInterrupt:
    sys.exit(9)
"""
    ended = run_python(SETUP + waiting, timeout_s=15)
    assert ended.returncode == 9, ended.stderr


def test_using_a_closed_node_is_a_typed_error() -> None:
    used = """
a, b = make('first'), make('b')
offer, pull = hand_over(a, b)
live = a.offer(blocks=[5], num_tokens=4, ttl_s=100)
a.close()
assert offer.released and live.released and live.state == 'failed'
for use in (lambda: a.offer(blocks=[1], num_tokens=4), lambda: live.wait(timeout_s=1)):
    try:
        use()
    except kvlink.errors.Closed as error:
        assert 'first' in str(error)
    else:
        raise AssertionError('a closed node went on')
"""
    ended = run_python(SETUP + used)
    assert ended.returncode == 0, ended.stderr
