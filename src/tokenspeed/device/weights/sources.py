"""Where tensors come from: the protocol that every file format meets, and the check of what is there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from tokenspeed.device.weights.shapes import Shape
from tokenspeed.errors import ModelError

SHOWN = 5
"""Tensors an error text lists by name."""


class TensorSource(Protocol):
    """The tensors of one checkpoint under their Hugging Face names (`weights.shapes`).

    A norm's tensor is what the normed values are multiplied by, in every family and format.
    """

    @property
    def where(self) -> str:
        """The file or folder, for error texts."""
        ...

    @property
    def stored_as(self) -> str:
        """The number format of the stored weights, for the log."""
        ...

    def called(self, name: str) -> str:
        """What the files call tensor `name`."""
        ...

    def file_of(self, called: str) -> str:
        """The file that has, or by its index should have, the tensor that the files call so; else `where`."""
        ...

    def shape(self, name: str) -> Shape | None:
        """None: there is no such tensor."""
        ...

    def unexpected(self, names: Collection[str]) -> list[str]:
        """Tensors, as the files call them, that are none of `names` and that a model would have to use."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor as float32 in memory of its own; rows of q and k in halves (`layers.rope.pair_rows`).

        Raises: ModelError: the file is damaged or was cut short.
        """
        ...


def check_tensors(source: TensorSource, expected: dict[str, Shape]) -> None:
    """Compare what is there with what the configuration asks for, before anything is read.

    Raises: ModelError: tensors are missing, of another shape, or of no use to the model.
    """
    missing = [source.called(name) for name in expected if source.shape(name) is None]
    if missing:
        raise ModelError(f"{_place(source, missing)}: {_listed(missing)} missing")
    for name, shape in expected.items():
        there = source.shape(name)
        if there != shape:
            called = source.called(name)
            raise ModelError(
                f"{source.file_of(called)}: tensor {called} has shape {there}; the configuration asks for {shape}"
            )
    strangers = source.unexpected(expected)
    if strangers:
        raise ModelError(
            f"{_place(source, strangers)}: {_listed(strangers)} in the file but not in this architecture;"
            " without it the model would compute something else"
        )


def _place(source: TensorSource, called: list[str]) -> str:
    files = {source.file_of(name) for name in called}
    return files.pop() if len(files) == 1 else source.where


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    noun, verb = ("tensor", "is") if len(names) == 1 else ("tensors", "are")
    return f"{noun} {', '.join(names[:SHOWN])}{more} {verb}"
