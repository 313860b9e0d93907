"""The kept corpora: one archive a target, unpacked to where the fuzzer works and goes on adding."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable
from pathlib import Path

KEPT = Path(__file__).parent / "corpus"
# All of them together stay below a megabyte.
MOST_BYTES = 48 << 10
_NO_TIME = (1980, 1, 1, 0, 0, 0)


def kept(target: str) -> list[bytes]:
    """Return the inputs that the tree keeps for a target."""
    archive = KEPT / f"{target}.zip"
    if not archive.exists():
        return []
    with zipfile.ZipFile(archive) as inside:
        return [inside.read(name) for name in inside.namelist()]


def unpack(target: str, folder: Path) -> Path:
    """Put them into `folder`, next to what it has."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in kept(target):
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)
    return folder


def pack(target: str, inputs: Iterable[bytes]) -> int:
    """Keep `inputs`, the shortest first, as far as there is room; return how many. Equal inputs give equal archives."""
    KEPT.mkdir(exist_ok=True)
    archive = KEPT / f"{target}.zip"
    count = 0
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as inside:
        for data in sorted(set(inputs), key=lambda one: (len(one), one)):
            if inside.fp is not None and inside.fp.tell() + len(data) + 300 * (count + 1) > 2 * MOST_BYTES:
                break
            entry = zipfile.ZipInfo(f"{count:04}", _NO_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            inside.writestr(entry, data)
            count += 1
    return count
