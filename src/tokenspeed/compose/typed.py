"""A typed spelling of dependency-injector's providers, whose own arguments are all `Any`.

With these five, a misspelled keyword, a wrong type, an unmet protocol and a missing argument are
errors of the type checker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from dependency_injector import providers

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def given(kind: Any) -> Any:
    """A value from outside; checked with isinstance when it is first used."""
    return providers.Dependency(instance_of=kind)


def ref(provider: providers.Provider[T]) -> T:
    """Name another provider as an argument: the checker sees what it gives, the container sees the provider."""
    return cast("T", provider)


def one(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> providers.Singleton[T]:
    """One instance for each container; the arguments are checked against `make`."""
    return providers.Singleton(make, *args, **kwargs)


def read(provider: providers.Provider[S], get: Callable[[S], T]) -> T:
    """Name a value that is read from what another provider gives, as an argument."""
    return cast("T", providers.Callable(get, provider))


def pick(key: str, **options: T) -> providers.Provider[T]:
    """One of several by name, which is an argument like any other (`read`, `ref`); only the chosen one is built."""
    return providers.Selector(cast("providers.Provider[str]", key), **cast("dict[str, providers.Provider[T]]", options))
