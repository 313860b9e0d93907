"""Runs one Python target under atheris: ``python -m fuzz.with_atheris NAME PROGRAM [options of libFuzzer]``.

``fuzz.run`` leaves a script in build/fuzz that says so, which is the program.
"""

from __future__ import annotations

import importlib
import logging
import sys

import atheris


def main() -> None:
    """Fuzz; never returns."""
    name, *program_and_options = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    # Only kvlink's own branches count: those of the draws say nothing about it.
    with atheris.instrument_imports(include=["kvlink"]):
        one = importlib.import_module(f"fuzz.python.{name}").one
    atheris.Setup(program_and_options, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
