"""From tensors to the parts of a layout: which element each dimension of a tensor counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvlink.errors import InvalidArgument
from kvlink.layout.geometry import Component, PartLayout
from kvlink.layout.regions import MemoryRegion
from kvlink.layout.tensors import TensorView, read_tensor

__all__ = ["DescribedTensors", "OtherComponent", "TensorDescription"]

OtherComponent = Literal["latent", "state", "scale"]
"""What a group may hold other than K and V."""


@dataclass(slots=True, kw_only=True)
class DescribedTensors:
    """What was read so far: parts with their absolute addresses, and the memory that they lie in."""

    parts: list[tuple[int, PartLayout]]
    extents: list[MemoryRegion]
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDescription:
    """What the caller says about all tensors of a group. ``layers`` belongs to a layer axis."""

    axes: tuple[str, ...]
    block_tokens: int | None
    component: OtherComponent | None
    group: str
    heads: range | None
    total_kv_heads: int | None
    layers: tuple[str, ...] | None
    dtype: str | None

    def __post_init__(self) -> None:
        """Refuse arguments that contradict each other.

        Raises
        ------
        InvalidArgument
            If they do.
        """
        if ("layer" in self.axes) != (self.layers is not None):
            raise InvalidArgument("layers=[names] goes with a layer axis, and a layer axis with layers=[names]")
        if self.layers is not None and len(set(self.layers)) != len(self.layers):
            raise InvalidArgument("layers has a name twice")
        self._check_component()
        if "head" not in self.axes:
            if self.heads is not None or self.total_kv_heads not in (None, 1):
                raise InvalidArgument("heads and total_kv_heads need a head axis; without one, data is replicated")
        elif self.heads is not None:
            self._check_heads(self.heads)

    def _check_component(self) -> None:
        if ("slot" in self.axes) == (self.block_tokens is not None):
            if "slot" in self.axes:
                raise InvalidArgument("block_tokens goes with a block axis; a slot holds no tokens")
            raise InvalidArgument("axes has a block axis: give block_tokens, the tokens that a block holds")
        if self.component not in (None, "latent", "state", "scale"):
            raise InvalidArgument(f"component is 'latent', 'state' or 'scale', not {self.component!r}")
        if "slot" in self.axes and self.component not in (None, "state"):
            raise InvalidArgument(f"slots hold the component 'state', not {self.component!r}")
        if self.component == "state" and "slot" not in self.axes:
            raise InvalidArgument("the component 'state' needs a slot axis")
        if "dim" not in self.axes and self.component != "scale":
            raise InvalidArgument(f"axes {' '.join(self.axes)!r}: axis 'dim' is missing")

    @property
    def slots(self) -> bool:
        """Whether a block is a slot of state."""
        return "slot" in self.axes

    def _check_heads(self, heads: range) -> None:
        if not isinstance(heads, range) or heads.step != 1 or not heads or heads.start < 0:
            raise InvalidArgument(f"heads must be a range of step 1 with at least one head, not {heads!r}")
        if self.total_kv_heads is None:
            raise InvalidArgument(f"heads={heads!r} needs total_kv_heads, the number of KV heads of the model")

    def read(self, tensors: Mapping[str, Any]) -> DescribedTensors:
        """Read all tensors.

        Raises
        ------
        InvalidArgument
            If a shape does not fit the description, or two tensors differ in their number of blocks.
        UnsupportedMemory
            If a tensor shows no memory.
        """
        if not isinstance(tensors, Mapping) or not tensors:
            raise InvalidArgument("tensors must map at least one layer name to a tensor")
        if self.layers is not None and len(tensors) != 1:
            raise InvalidArgument(f"a layer axis goes with one tensor for all layers, not {len(tensors)}")
        described = DescribedTensors(parts=[], extents=[], num_blocks=0)
        for layer, value in tensors.items():
            if not isinstance(layer, str):
                raise InvalidArgument(f"layer names are strings, not {type(layer).__name__}")
            for name, components, tensor in self._components(layer, value):
                self._add(described, layer, components, name, read_tensor(name, tensor))
        return described

    def _components(self, layer: str, value: Any) -> Iterator[tuple[str, tuple[Component, ...], Any]]:
        """Yield each tensor of a layer, with its name for messages and the components along its kv axis."""
        pair: tuple[Component, Component] = ("k_scale", "v_scale") if self.component == "scale" else ("k", "v")
        if isinstance(value, Mapping):
            if set(value) != {"k", "v"} or self.component in ("latent", "state") or self.slots:
                raise InvalidArgument(f"{layer}: {self._takes()}, not {sorted(map(str, value))}")
            if "kv" in self.axes:
                raise InvalidArgument(f"{layer}: tensors of K and V apart have no kv axis")
            yield f"{layer}[k]", pair[:1], value["k"]
            yield f"{layer}[v]", pair[1:], value["v"]
        elif "kv" in self.axes:
            if self.component == "latent":
                raise InvalidArgument(f"{layer}: latents have no kv axis")
            yield layer, pair, value
        elif self.slots:
            yield layer, ("state",), value
        elif self.component is not None:
            yield layer, (self.component,), value
        elif "head" in self.axes:
            raise InvalidArgument(f'{layer}: without a kv axis, give {{"k": tensor, "v": tensor}}')
        else:
            yield layer, ("latent",), value

    def _takes(self) -> str:
        one = self.slots or self.component in ("latent", "state")
        return "a layer has one tensor" if one else "a mapping has the tensors 'k' and 'v'"

    def _add(
        self, described: DescribedTensors, layer: str, components: Sequence[Component], name: str, view: TensorView
    ) -> None:
        sizes = self._sizes(name, view)
        num_blocks = sizes["slot" if self.slots else "block"]
        if described.num_blocks not in (0, num_blocks):
            raise InvalidArgument(f"{name} has {num_blocks} blocks, another tensor has {described.num_blocks}")
        described.num_blocks = num_blocks
        described.extents.append(_extent(view))
        strides = dict(zip(self.axes, view.strides, strict=True))
        layers = (layer,) if self.layers is None else self.layers
        for i, layer_name in enumerate(layers):
            for j, component_name in enumerate(components):
                address = view.address + i * strides.get("layer", 0) + j * strides.get("kv", 0)
                part = self._part(view, layer_name, component_name, sizes, strides)
                described.parts.append((address, part))

    def _sizes(self, name: str, view: TensorView) -> dict[str, int]:
        """Return the tensor's size along each axis, checked against the description."""
        if len(view.shape) != len(self.axes):
            raise InvalidArgument(f"{name} has {len(view.shape)} dimensions {view.shape}, axes names {len(self.axes)}")
        sizes = dict(zip(self.axes, view.shape, strict=True))
        wanted = {"kv": 2}
        if self.block_tokens is not None:
            wanted["token"] = self.block_tokens
        if self.layers is not None:
            wanted["layer"] = len(self.layers)
        if self.heads is not None:
            wanted["head"] = len(self.heads)
        elif self.total_kv_heads is not None:
            wanted["head"] = self.total_kv_heads
        for axis, size in wanted.items():
            if axis in sizes and sizes[axis] != size:
                raise InvalidArgument(f"{name} has size {sizes[axis]} on its {axis} axis, not {size}: {view.shape}")
        return sizes

    def _part(
        self, view: TensorView, layer: str, component: Component, sizes: dict[str, int], strides: dict[str, int]
    ) -> PartLayout:
        head_count = sizes.get("head", 1)
        return PartLayout(
            group=self.group,
            layer=layer,
            component=component,
            head_start=0 if self.heads is None else self.heads.start,
            head_count=head_count,
            total_kv_heads=head_count if self.total_kv_heads is None else self.total_kv_heads,
            head_dim=sizes.get("dim", 1),
            element_bytes=view.element_bytes,
            dtype=_tag(self.dtype, view),
            region=0,
            offset=0,
            block_stride=strides["slot" if self.slots else "block"],
            token_stride=strides.get("token", 0),
            head_stride=strides.get("head", 0),
            dim_stride=strides.get("dim", 0),
        )


def _extent(view: TensorView) -> MemoryRegion:
    return MemoryRegion(address=view.address, nbytes=view.nbytes, owner=view.owner, kind=view.kind, device=view.device)


def _tag(dtype: str | None, view: TensorView) -> str:
    """Return the tag for the elements; one that names a width must name the width of the tensor's elements."""
    if dtype is None:
        return view.dtype
    width = re.match(r"(?:u?int|b?float|complex)(\d+)(?:_|$)", dtype)
    if width is not None and int(width[1]) != view.element_bytes * 8:
        raise InvalidArgument(f"dtype={dtype!r} for elements of {view.element_bytes} bytes ({view.dtype})")
    return dtype
