"""Which implementation computes a model."""

from __future__ import annotations

import attrs

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.native.model import cpu_model_factory
from tokenspeed.device.parts import ModelFactory
from tokenspeed.errors import NotSupported
from tokenspeed.settings.model import DeviceSettings, Forward


def model_factory(device: DeviceSettings, config: ModelConfig) -> ModelFactory:
    """What `device.forward`, `weights` and `kv_dtype` ask for, or torch where nothing else computes the model.

    Raises: as `cpu_model_factory`; NotSupported also: the native forward is asked for a model it does not compute.
    """
    if config.linear is None:
        return cpu_model_factory(device)
    if device.forward is Forward.NATIVE:
        raise NotSupported(
            f"device.forward: native computes no linear attention, which {config.model_type} has; "
            f"set it to {Forward.TORCH.value} or {Forward.AUTO.value}"
        )
    return cpu_model_factory(attrs.evolve(device, forward=Forward.TORCH))
