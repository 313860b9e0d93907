"""What a target may have converted, and where that lies until it is: the layout that its source is told."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from helpers.element_tags import Request, check_handoff, memory_of, move, plan_of
from helpers.fleets import Fleet, Group, Rank, build

import kvlink
from kvlink._native import Conversion
from kvlink.errors import ConfigError, InvalidArgument, LayoutMismatch
from kvlink.layout import validate_layout
from kvlink.plan import as_delivered, check_conversions, compile_conversion, select

CONVERT = ("float32->bfloat16",)
WIDE = Group(dtype="uint32", tag="float32", layers=("l0", "l1"), num_blocks=3)
NARROW = replace(WIDE, dtype="uint16", tag="bfloat16", axes=("kv", "block", "head", "token", "dim"))


def ranks(source: Group = WIDE, target: Group = NARROW) -> tuple[Rank, Rank]:
    rng = np.random.default_rng(3)
    (left,), (right,) = build(Fleet(groups=(source,)), rng), build(Fleet(groups=(target,), convert=CONVERT), rng)
    return left, right


def whole_request() -> Request:
    tables = {"full": np.array([2, 0], np.int32)}
    return Request(num_tokens=20, skip_tokens=0, source_tables=[tables], target_tables={"full": tables["full"][::-1]})


@pytest.mark.parametrize(
    "asked", [("float64->bfloat16",), ("float32",), ("float32->float32",), (7,), "float32->float16"]
)
def test_a_conversion_that_is_not_possible_is_refused_with_those_that_are(asked: object) -> None:
    cache = ranks()[0].cache
    with pytest.raises(ConfigError, match=r"bfloat16->float16, .*float16->float32, .*float32->bfloat16"):
        kvlink.Node(cache, name="node", convert=asked)  # type: ignore[arg-type]


def test_a_refusal_says_how_a_conversion_is_asked_for() -> None:
    source, target = ranks()
    with pytest.raises(LayoutMismatch, match=r"make the target's node with convert=\('float32->bfloat16',\)") as caught:
        select([source.cache.layout], target.cache.layout, seed=0)
    assert (caught.value.source_value, caught.value.target_value) == ("float32", "bfloat16")


def test_a_source_that_is_untrue_about_its_elements_is_refused() -> None:
    source, target = ranks()
    parts = tuple(msgspec.structs.replace(part, element_bytes=2, dim_stride=2) for part in source.cache.layout.parts)
    lying = msgspec.structs.replace(source.cache.layout, parts=parts)
    with pytest.raises(LayoutMismatch, match="dtype"):
        select([lying], target.cache.layout, seed=0, converts=check_conversions(CONVERT))


def test_without_the_conversion_nothing_would_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = ranks()
    check_handoff([source], target, whole_request(), np.random.default_rng(1))
    delivered, request = as_delivered(source.cache.layout, target.cache.layout), whole_request()
    template, plan = plan_of(source, delivered, request, request.source_tables[0])
    before = [backing.tobytes() for backing in target.backings]
    scratch = np.zeros(delivered.region_bytes[-1], np.uint8)
    conversion = compile_conversion(delivered, target.cache.layout)
    assert conversion is not None
    first, _ = conversion.steps(template, plan)
    move(template, first, source, [*memory_of(target.cache), scratch], way="direct", cuts=())
    assert [backing.tobytes() for backing in target.backings] == before
    assert scratch.any()
    monkeypatch.setattr(Conversion, "run", lambda *_: None)
    source, target = ranks()
    with pytest.raises(AssertionError):
        check_handoff([source], target, whole_request(), np.random.default_rng(2))


def test_what_the_source_is_told_lies_in_its_dtype_behind_the_target_s_own_memory() -> None:
    source, target = ranks()
    own = target.cache.layout
    told = as_delivered(source.cache.layout, own)
    validate_layout(told)
    assert told.region_bytes[:-1] == own.region_bytes
    assert told.region_bytes[-1] == 3 * 16 * 8 * 4 * 4 * 4  # blocks, tokens, heads, dims, bytes, parts
    for part, arriving in zip(own.parts, told.parts, strict=True):
        assert (arriving.dtype, arriving.element_bytes, arriving.region) == ("float32", 4, len(own.region_bytes))
        assert (arriving.token_stride, arriving.head_stride, arriving.dim_stride) == tuple(
            2 * stride for stride in (part.token_stride, part.head_stride, part.dim_stride)
        )


def test_what_agrees_goes_directly() -> None:
    source, target = ranks(source=NARROW)
    own = target.cache.layout
    assert as_delivered(source.cache.layout, own) is own
    assert compile_conversion(own, own) is None


def test_a_conversion_is_made_only_over_the_memory_that_it_is_for() -> None:
    source, target = ranks()
    delivered = as_delivered(source.cache.layout, target.cache.layout)
    conversion = compile_conversion(delivered, target.cache.layout)
    assert conversion is not None
    request = whole_request()
    template, plan = plan_of(source, delivered, request, request.source_tables[0])
    regions = [(region.address, region.nbytes) for region in target.cache.regions]
    with pytest.raises(InvalidArgument, match="not those that the conversion is made for"):
        conversion.run(conversion.steps(template, plan)[1], regions)
    with pytest.raises(InvalidArgument, match="float64 does not become float32"):
        Conversion(template=template, pairs=[("float64", "float32")], scratch_bytes=8)
    with pytest.raises(InvalidArgument, match="a pair of dtypes is missing"):
        Conversion(template=template, pairs=[], scratch_bytes=8)
    pairs = [("float32", "float16")] * len(source.cache.regions)
    with pytest.raises(InvalidArgument, match="leave scratch memory"):
        Conversion(template=template, pairs=pairs, scratch_bytes=8)
    with pytest.raises(InvalidArgument, match="another length"):
        Conversion(template=template, pairs=pairs, scratch_bytes=1 << 30)
