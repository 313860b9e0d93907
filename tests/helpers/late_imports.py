"""Large packages that a test module imports when a test of it runs: every process of a run collects every module."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

__all__ = ["import_late", "skip_without"]


def skip_without(*packages: str, reason: str = "the demo extra is not installed") -> None:
    """Skip the calling module if one of these packages is not installed. Imports none of them."""
    if any(importlib.util.find_spec(package) is None for package in packages):
        pytest.skip(reason, allow_module_level=True)


class _Late:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # collecting looks at everything that a module has
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def import_late(name: str, *, of: str = "") -> Any:
    """Return the module, which is imported once something of it is used; skip where its package `of` is missing."""
    skip_without(of or name)
    return _Late(name)
