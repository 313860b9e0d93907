"""Two workers, one block: what a prefill computed in one process is read by another, step by step."""

import json
import multiprocessing
from multiprocessing.connection import Connection

import numpy as np

import kvlink


def paged_cache() -> tuple[np.ndarray, kvlink.KVCache]:
    """One layer with 8 blocks of 16 tokens, 2 heads of 64, in memory that a process on this host may map."""
    tensor = np.asarray(kvlink.empty((2, 8, 16, 2, 64), "float32"))
    return tensor, kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=16)


def prefill(router: Connection) -> None:
    """Fill block 3 with keys and values, offer it, and keep it until it was read."""
    tensor, cache = paged_cache()
    tensor[0, 3], tensor[1, 3] = 1.5, 2.5
    with kvlink.Node(cache, name="prefill-0") as node:
        offer = node.offer(blocks=[3], num_tokens=16, ttl_s=30, payload=b"first token: 42")
        router.send(json.dumps(offer.ticket))
        offer.wait(timeout_s=20)
        offer.wait_released(timeout_s=20)
    print("prefill: the block was read and may be used again", flush=True)


def main() -> None:
    """Start the prefill worker; be the decode worker."""
    router, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=prefill, args=(theirs,))
    worker.start()
    ticket = json.loads(router.recv())
    print(f"router: the ticket is {len(json.dumps(ticket))} bytes of JSON from {ticket['sources'][0]['name']}")

    tensor, cache = paged_cache()
    with kvlink.Node(cache, name="decode-0") as node:
        pull = node.pull(ticket, blocks=[6], deadline_s=10)
        pull.wait(timeout_s=10)
    print(f"decode: {pull.bytes} bytes by lane {pull.lane}, payload {pull.payload.decode()!r}")
    print(f"decode: block 6 now holds K {tensor[0, 6].mean()} and V {tensor[1, 6].mean()}")
    worker.join(timeout=20)


if __name__ == "__main__":
    main()
