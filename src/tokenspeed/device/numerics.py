"""A name for what computes keys and values: two engines of one name compute the same bytes for the same tokens."""

from __future__ import annotations

import torch

from tokenspeed.device.native.step import NativeStep
from tokenspeed.device.step import ForwardStep
from tokenspeed.settings.model import Backend, Settings


def numerics_of(step: ForwardStep, settings: Settings) -> str:
    """Kernels with their version and instruction set, and the formats of weights and KV.

    Other ways to compute the same model come out a little different, which a stored page would mix.
    """
    device = settings.device
    if isinstance(step, NativeStep):
        kernels = f"{step.library.path.name}:{step.library.instruction_set}"
    else:
        on_gpu = device.backend is Backend.CUDA and torch.cuda.is_available()
        unit = torch.cuda.get_device_name() if on_gpu else torch.backends.cpu.get_cpu_capability()
        kernels = f"{device.backend.value}:torch-{torch.__version__}:{unit}"
    return f"{kernels}:{device.weights.value}:{device.kv_dtype.value}"
