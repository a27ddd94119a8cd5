"""The step in force: weights change under an executor that keeps its step, its pool and its slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch

from tokenspeed.device.native.step import Scratch
from tokenspeed.device.native.structs import PoolStruct
from tokenspeed.device.step import ForwardStep, LayersReady, RaggedRows
from tokenspeed.errors import InvariantBroken


@attrs.define(eq=False)
class StepInForce:
    """Writer: jobs of the exec stream. None: the weights were given back."""

    step: ForwardStep | None


@attrs.frozen(kw_only=True, eq=False)
class CurrentStep:
    """`device.step.ForwardStep` of whatever weights are in force.

    Attributes:
        num_layers: the same for all of them.
    """

    num_layers: int
    state: StepInForce

    def run(
        self, rows: RaggedRows, *, layers: range, ready: LayersReady, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Raises InvariantBroken: there are no weights; a forward was planned over released memory."""
        step = self.state.step
        if step is None:
            raise InvariantBroken("a forward without weights", layers=layers)
        return step.run(rows, layers=layers, ready=ready, hidden=hidden)


def current_step(step: ForwardStep) -> CurrentStep:
    return CurrentStep(num_layers=step.num_layers, state=StepInForce(step=step))


@attrs.frozen(kw_only=True, eq=False)
class PoolParts:
    """What of a bound step belongs to its pool and not to its weights, in the order in which a step is walked.

    Tensors in the pool's memory, the addresses that native code is given, and the native step's working memory.
    """

    parts: tuple[object, ...]


def pool_parts(step: ForwardStep, pool: object) -> PoolParts:
    """
    Args:
        pool: what `step` was bound to.
    """
    memory = _memory_of(pool)
    return PoolParts(parts=tuple(part for part in _leaves(step) if _of_pool(part, memory)))


def with_pool(step: ForwardStep, pool: object, parts: PoolParts) -> ForwardStep:
    """`step`, bound to a pool of its own that only served to build it, over the pool that `parts` come from.

    Raises: InvariantBroken: it is another model's.
    """
    memory, left = _memory_of(pool), iter(parts.parts)
    grafted = _grafted(step, memory, left)
    if next(left, None) is not None:
        raise InvariantBroken("a step with fewer cache groups than the pool in use", parts=len(parts.parts))
    return grafted  # type: ignore[return-value]  # a walk keeps the type of its root


def pool_memory(pool: object) -> tuple[torch.Tensor, ...]:
    """The tensors of a pool."""
    return tuple(leaf for leaf in _leaves(pool) if isinstance(leaf, torch.Tensor))


def _memory_of(pool: object) -> frozenset[int]:
    return frozenset(_storage(tensor) for tensor in pool_memory(pool))


def _storage(tensor: torch.Tensor) -> int:
    """Where its memory begins; 0 for layouts without an address, which no pool has."""
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _of_pool(leaf: object, memory: frozenset[int]) -> bool:
    if isinstance(leaf, torch.Tensor):
        return bool(found := _storage(leaf)) and found in memory
    return isinstance(leaf, PoolStruct | Scratch)


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(kind))


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
    elif attrs.has(type(value)) and not isinstance(value, Scratch):
        for name in _names(type(value)):
            yield from _leaves(getattr(value, name))
    else:
        yield value


def _grafted(value: object, memory: frozenset[int], parts: Iterator[object]) -> object:
    if isinstance(value, tuple):
        items = tuple(_grafted(item, memory, parts) for item in value)
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    if attrs.has(type(value)) and not isinstance(value, Scratch):
        found = {name: getattr(value, name) for name in _names(type(value))}
        changed = {name: new for name, old in found.items() if (new := _grafted(old, memory, parts)) is not old}
        return attrs.evolve(value, **changed) if changed else value  # type: ignore[misc]  # an attrs instance
    if not _of_pool(value, memory):
        return value
    part = next(parts, None)
    if type(part) is not type(value):
        raise InvariantBroken("a step that is not built like the one in use", has=type(value), expected=type(part))
    return part
