"""Which implementation of a matrix product a call takes: kernels that compile per shape only before the mark.

Some libraries compile a kernel once for each exact number of rows, with nothing to bucket, or have a
tile choice that was measured inside captured graphs only. Such kernels are for start-up, where graphs
capture them; a graph that is replayed keeps the kernel it was captured with. An eager call after the
mark takes a product that needs no compilation.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import attrs


class Product(enum.Enum):
    """Matrix products whose route depends on the mark."""

    JOINT_BF16 = "two bfloat16 products in one call"
    ROUTER_DOT = "the router's product, one compilation for each number of rows"
    DECODE_BF16 = "a bfloat16 product of few rows with a small weight"
    OTHER = "any other"


class Route(enum.Enum):
    """COMPILED_PER_SHAPE: one compilation a shape. PINNED_TILE: one a tile. PREBUILT: none."""

    COMPILED_PER_SHAPE = "compiled per shape"
    PINNED_TILE = "pinned tile"
    PREBUILT = "prebuilt"


_BEFORE_THE_MARK: Mapping[Product, Route] = MappingProxyType(
    {
        Product.JOINT_BF16: Route.COMPILED_PER_SHAPE,
        Product.ROUTER_DOT: Route.COMPILED_PER_SHAPE,
        Product.DECODE_BF16: Route.PINNED_TILE,
    }
)


class ServingSwitch(Protocol):
    """`JitMonitor`, as far as kernels ask it."""

    def is_serving(self) -> bool: ...


def eager_route(product: Product, switch: ServingSwitch) -> Route:
    """The route of a call that no graph replays (DP-83, DP-84)."""
    if switch.is_serving():
        return Route.PREBUILT
    return _BEFORE_THE_MARK.get(product, Route.PREBUILT)


@attrs.frozen(kw_only=True)
class CapturedCall:
    """A product inside a captured graph: the route is the capture's for as long as the graph lives."""

    product: Product
    route: Route


def capture_call(product: Product, switch: ServingSwitch) -> CapturedCall:
    """Record a product into a graph that is being captured."""
    return CapturedCall(product=product, route=eager_route(product, switch))
