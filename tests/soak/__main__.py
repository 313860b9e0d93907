"""``python -m soak``: the mixed load for so many seconds, a report, and a verdict as exit status."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
from pathlib import Path

from soak.run import run_soak


def main() -> int:
    """Run, and say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_SECONDS") or 3600))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED") or secrets.randbelow(1 << 24)))
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    parser.add_argument("--quiet-ticks", type=int, default=300, help="ticks of load between two quiet points")
    parser.add_argument("--plant", default="", help="what the soak has to find, such as 'lost block'")
    parser.add_argument("--only", default="", help="the members that take part, by name: all by default")
    parser.add_argument("--one-host", action="store_true", help="leave the two hosts with a cable out")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("soak").setLevel(logging.INFO)
    print(f"mixed soak: {given.seconds:g} s, SEED={given.seed}", flush=True)
    result = run_soak(
        seconds=given.seconds,
        seed=given.seed,
        quiet_ticks=given.quiet_ticks,
        plant=given.plant,
        two_hosts=not given.one_host,
        only=tuple(given.only.split(",")) if given.only else (),
    )
    path = result.write(given.out)
    print(path.read_text())
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
