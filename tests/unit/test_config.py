"""Limits have bounds, and say which one was overstepped."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from kvlink.config import _BOUNDS, Limits
from kvlink.errors import ConfigError


def test_the_defaults_are_within_their_bounds_and_every_field_has_some() -> None:
    assert set(_BOUNDS) == {field.name for field in dataclasses.fields(Limits)}
    Limits()


@pytest.mark.parametrize("name", _BOUNDS)
def test_both_bounds_of_every_field_are_allowed_and_nothing_beyond(name: str) -> None:
    low, high = _BOUNDS[name]
    for value in (low, high):
        assert getattr(Limits(**{name: value}), name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=rf"limits\.{name} is {value}, outside \[.*\]"):
            Limits(**{name: value})


@pytest.mark.parametrize("value", ["5", None, True, math.nan, math.inf])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="connect_timeout_s"):
        Limits(connect_timeout_s=value)


def test_a_count_is_no_fraction() -> None:
    with pytest.raises(ConfigError, match="max_handoffs must be a whole number"):
        Limits(max_handoffs=2.5)  # type: ignore[arg-type]


def test_the_environment_is_read_when_asked_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINK_CONNECT_TIMEOUT_S", "1.5")
    monkeypatch.setenv("KVLINK_MAX_HANDOFFS", "7")
    assert Limits().max_handoffs != 7
    assert Limits.from_env() == Limits(connect_timeout_s=1.5, max_handoffs=7)


@pytest.mark.parametrize(
    ("variable", "text"),
    [("KVLINK_MAX_HANDOFFS", "many"), ("KVLINK_MAX_HANDOFFS", "1.5"), ("KVLINK_CLOSE_DEADLINE_S", "-1")],
)
def test_a_wrong_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        Limits.from_env({variable: text})


def test_limits_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().max_handoffs = 1  # type: ignore[misc]
