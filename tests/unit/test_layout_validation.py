"""validate_layout: what a peer sends is hostile until it has passed."""

import msgspec
import pytest

from kvlink.errors import InvalidArgument
from kvlink.layout import CacheLayout, GroupLayout, PartLayout, validate_layout

GROUP = GroupLayout(name="full", num_blocks=4, block_tokens=2)
PART = PartLayout(
    group="full",
    layer="l0",
    component="k",
    head_start=0,
    head_count=3,
    total_kv_heads=3,
    head_dim=8,
    element_bytes=2,
    dtype="float16",
    region=0,
    offset=0,
    block_stride=96,
    token_stride=48,
    head_stride=16,
    dim_stride=2,
)


def layout_of(*changes, group=None, region_bytes=(4096,), groups=None):
    parts = tuple(msgspec.structs.replace(PART, **change) for change in (changes or ({},)))
    groups = groups or (msgspec.structs.replace(GROUP, **(group or {})),)
    return CacheLayout(groups=groups, parts=parts, region_bytes=region_bytes)


def test_a_sound_layout_passes():
    validate_layout(layout_of())
    validate_layout(layout_of({}, {"component": "v", "offset": 384}))


def test_parts_may_fill_the_gaps_of_each_other():
    """K and V interleaved by block, by token or by head share their bounds and no byte."""
    apart = {"block_stride": 192, "token_stride": 96}
    validate_layout(layout_of(apart, {**apart, "component": "v", "offset": 48}))
    wide = {"block_stride": 192, "token_stride": 96, "head_stride": 32}
    validate_layout(layout_of(wide, {**wide, "component": "v", "offset": 16}))
    with pytest.raises(InvalidArgument, match="share bytes"):
        validate_layout(layout_of(wide, {**wide, "component": "v", "offset": 15}))


def test_heads_may_come_in_several_parts():
    first = {"head_count": 1, "total_kv_heads": 3}
    rest = {"head_start": 1, "head_count": 2, "total_kv_heads": 3, "offset": 512}
    validate_layout(layout_of(first, rest))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([{"offset": 4096 - 384 + 1}], "ends at byte 4097"),
        ([{"block_stride": 1 << 62}], "ends at byte"),
        ([{"block_stride": 1 << 63}], "malformed"),
        ([{"block_stride": -96}], "malformed"),
        ([{"offset": -1}], "malformed"),
        ([{"head_dim": 0}], "malformed"),
        ([{"head_count": 1 << 40}], "malformed"),
        ([{"element_bytes": 1.5}], "malformed"),
        ([{"component": "q"}], "malformed"),
        ([{"dtype": ""}], "malformed"),
        ([{"layer": "x" * 1000}], "malformed"),
        ([{"layer": None}], "malformed"),
        ([{"region": 1}], "region 1 of 1"),
        ([{"group": "other"}], "no such group|no layer in group"),
        ([{"block_stride": 95}], "blocks share bytes"),
        ([{"token_stride": 0}], "tokens share bytes"),
        ([{"dim_stride": 1}], "dims share bytes"),
        ([{"head_start": 1}], "there are 3 heads in all"),
        ([{}, {}], "both hold head 0"),
        ([{}, {"offset": 1024}], "both hold head 0"),
        ([{"head_count": 2}, {"head_start": 2, "head_count": 1, "dtype": "int16", "offset": 512}], "differ in more"),
        ([{}, {"component": "v"}], "share bytes"),
        ([{}, {"component": "v", "offset": 383}], "share bytes"),
        ([{}, {"layer": "l1", "offset": 94}], "share bytes"),
    ],
)
def test_parts_that_cannot_be_right_are_refused(changes, reason):
    with pytest.raises(InvalidArgument, match=reason):
        validate_layout(layout_of(*changes))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_blocks": 0}, "malformed"),
        ({"num_blocks": 1 << 31}, "malformed"),
        ({"num_blocks": 1 << 30}, "ends at byte"),
        ({"block_tokens": 0}, "malformed"),
        ({"window": 0}, "malformed"),
        ({"window": "all"}, "malformed"),
    ],
)
def test_groups_that_cannot_be_right_are_refused(change, reason):
    with pytest.raises(InvalidArgument, match=reason):
        validate_layout(layout_of(group=change))


def test_groups_have_names_of_their_own():
    with pytest.raises(InvalidArgument, match="two groups of one name"):
        validate_layout(layout_of(groups=(GROUP, GROUP)))


def test_what_nothing_is_taken_of_may_have_no_parts():
    other = msgspec.structs.replace(GROUP, name="other")
    validate_layout(layout_of(groups=(GROUP, other)))
    validate_layout(CacheLayout(groups=(GROUP, other), parts=(), region_bytes=(4096,)))


def test_a_layout_without_groups_is_refused():
    with pytest.raises(InvalidArgument, match="malformed"):
        validate_layout(CacheLayout(groups=(), parts=(), region_bytes=()))


def test_fields_of_another_version_are_not_ignored():
    message = msgspec.to_builtins(layout_of())
    message["parts"][0]["interleave"] = 2
    with pytest.raises(msgspec.ValidationError, match="interleave"):
        msgspec.convert(message, CacheLayout)


def test_a_layout_made_to_burn_time_is_refused_soon():
    """Thousands of parts that interleave with unlike strides cannot be told apart cheaply."""
    changes = [
        {
            "layer": f"l{i}",
            "offset": i * 16,
            "head_dim": 1,
            "head_count": 1,
            "token_stride": 0,
            "block_stride": 7919 + i,
        }
        for i in range(4000)
    ]
    group = {"block_tokens": 1, "num_blocks": 100_000}
    with pytest.raises(InvalidArgument, match="irregular|share bytes"):
        validate_layout(layout_of(*changes, group=group, region_bytes=(1 << 40,)))
