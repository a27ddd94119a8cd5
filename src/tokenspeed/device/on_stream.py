"""Start-up work on the thread that computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from tokenspeed.device.backends.base import DeviceStream

T = TypeVar("T")


def on_stream(stream: DeviceStream, make: Callable[[], T], label: str) -> T:
    """Run `make` as a job of `stream` and wait for it: no other thread may compute.

    Raises what `make` raised; the stream is of no use afterwards.
    """
    made: list[T] = []

    def job() -> None:
        with torch.inference_mode():
            made.append(make())

    stream.submit(job, label).wait()
    return made[0]
