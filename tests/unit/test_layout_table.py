"""The table of docs/LAYOUTS.md is true: each row is built, and served element for element or refused as it says."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from helpers.element_tags import check_handoff
from helpers.fleet_draws import draw_request
from helpers.fleets import Fleet, Group, build
from helpers.layout_table import Row, refused_fields, rows

from kvlink.errors import LayoutMismatch
from kvlink.plan import compile_template, select
from kvlink.plan.mismatch import Field

PLAIN = Group()
AXES = {
    "kv": PLAIN.axes,
    "kv_scale": PLAIN.axes,
    "latent": ("block", "token", "dim"),
    "scale": ("block", "token", "head", "dim"),
    "state": ("slot", "head", "dim"),
}
COUNTS = {"heads": "heads", "dim": "dim", "block": "block_tokens", "blocks": "num_blocks", "window": "window"}
TEXTS = {"name": "name", "kind": "kind", "dtype": "dtype", "tag": "tag"}


def spellings(cell: str) -> list[str]:
    """Every combination that a cell stands for: ``a/b`` in a word, ``or`` between whole cells."""
    found = []
    for whole in cell.split(" or "):
        options = []
        for word in whole.split():
            key, equals, value = word.partition("=")
            options.append([f"{key}{equals}{one}" for one in value.split("/")] if equals else [word])
        found += [" ".join(words) for words in itertools.product(*options)]
    return found


def fleet_of(cell: str) -> Fleet:
    """Read a cell of the table."""
    whole: dict[str, Any] = {}
    groups = []
    for text in cell.split("&"):
        group: dict[str, Any] = {}
        for word in text.split():
            key, _, value = word.partition("=")
            if key in COUNTS:
                group[COUNTS[key]] = int(value)
            elif key in TEXTS:
                group[TEXTS[key]] = value
            elif key == "layers":
                group["layers"] = tuple(value.split("+"))
            elif key == "axes":
                group["axes"] = tuple(value.split(","))
            elif key == "packed":
                group["packed"] = True
            elif key in ("tp", "absent"):
                whole[key] = int(value) if key == "tp" else (int(value),)
            elif key == "pp":
                whole["stages"] = tuple(map(int, value.split("+")))
            elif key == "convert":
                whole[key] = tuple(value.split("+"))
            elif key in ("model", "shared"):
                whole[key] = value if key == "model" else True
            else:
                assert word == "-", f"the table has a word that means nothing: {word}"
        groups.append(group_of(group))
    blocks = max(group.num_blocks for group in groups) * len(groups) if whole.get("shared") else None
    return Fleet(groups=tuple(replace(group, num_blocks=blocks) if blocks else group for group in groups), **whole)


def group_of(said: dict[str, Any]) -> Group:
    group = Group(**{"axes": AXES[said.get("kind", "kv")], "heads": 0 if said.get("kind") == "latent" else 8, **said})
    if not group.heads:
        group = replace(group, axes=tuple(axis for axis in group.axes if axis != "head"))
    if "num_blocks" not in said:
        group = replace(group, num_blocks=3 if group.slots else max(2, -(-90 // group.block_tokens)))
    return group


def pairs(row: Row) -> list[tuple[str, str]]:
    return list(itertools.product(spellings(row.source), spellings(row.target)))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.what)
def test_the_row_is_true(row: Row) -> None:
    for number, (source, target) in enumerate(pairs(row)):
        rng = np.random.default_rng(number)
        sources, targets = build(fleet_of(source), rng), build(fleet_of(target), rng)
        fields = set()
        for rank in targets:
            if not row.refused:
                check_handoff(sources, rank, draw_request(sources, rank, rng), rng)
                continue
            with pytest.raises(LayoutMismatch) as caught:
                select([one.cache.layout for one in sources], rank.cache.layout, seed=number, converts=rank.converts)
            fields.add(caught.value.field)
            if len(sources) == 1:
                with pytest.raises(LayoutMismatch, match=re.escape(str(caught.value))):
                    compile_template(sources[0].cache.layout, rank.cache.layout)
        assert fields == ({row.refused} if row.refused else set()), f"{source} -> {target}"


def test_the_table_lists_what_the_code_can_refuse_and_nothing_else() -> None:
    fields = {field for one in get_args(Field) for field in (get_args(one) or (one,))}
    assert refused_fields() == fields


def test_the_table_has_every_pair_of_degrees() -> None:
    degrees = {(fleet_of(s).tp, fleet_of(t).tp) for row in rows() for s, t in pairs(row)}
    assert degrees >= set(itertools.product((1, 2, 4, 8), repeat=2))
    assert len(rows()) > 30
