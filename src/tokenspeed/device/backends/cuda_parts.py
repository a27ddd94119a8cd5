"""What takes the place of the processor's parts where the settings ask for a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import torch

from tokenspeed.checkpoint.checkpoint import Checkpoint
from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.checkpoint.progress import Progress
from tokenspeed.device.backends.cuda import open_cuda_backend, torch_cuda
from tokenspeed.device.backends.cuda_api import CudaApi, TorchCuda
from tokenspeed.device.backends.cuda_layers import CudaLayersArrived
from tokenspeed.device.defaults import ModelFromWeights
from tokenspeed.device.executors.futures.model_input import powers_of_two
from tokenspeed.device.executors.ports import BlockPool
from tokenspeed.device.graphs import Capture, capture_decodes, torch_capture
from tokenspeed.device.kernels.registry import Kernels, kernels_for
from tokenspeed.device.kv.block_mover import DriverMover, TierParts
from tokenspeed.device.kv.layout import CacheGroup
from tokenspeed.device.kv.pool import KvPool
from tokenspeed.device.machine import Machine, read_machine
from tokenspeed.device.memory import longest_wanted
from tokenspeed.device.native.model import cpu_model_factory
from tokenspeed.device.parts import BoundModel, DeviceParts, LoadedWeights
from tokenspeed.device.sampling.base import Sampler
from tokenspeed.device.sampling.device_sampler import device_sampler
from tokenspeed.device.step import ForwardStep
from tokenspeed.device.weights.bind import bind_model
from tokenspeed.device.weights.load import Weights
from tokenspeed.errors import InvariantBroken, NotSupported, SettingsError
from tokenspeed.plane.plan import BlockCopy
from tokenspeed.settings.model import Executor, Forward, Settings

SWAP = (BlockCopy(source=1, destination=2), BlockCopy(source=2, destination=1))


@attrs.frozen(kw_only=True, eq=False)
class CudaBound:
    """A model on the device."""

    step: ForwardStep
    pool: BlockPool


@attrs.frozen(kw_only=True, eq=False)
class CudaModel:
    """`device.parts.ModelFactory`: weights are read on the host, float32, and moved; decodes are captured.

    Attributes:
        longest: tokens of the longest request.
        sizes: batch sizes to capture.
    """

    device: torch.device
    kernels: Kernels
    capture: Callable[[], Capture]
    longest: int
    sizes: tuple[int, ...]
    host: ModelFromWeights = attrs.field(factory=ModelFromWeights)

    def expected_bytes(self, config: ModelConfig) -> int:
        return self.host.expected_bytes(config)

    def cache_groups(self, config: ModelConfig, page_tokens: int) -> tuple[CacheGroup, ...]:
        return self.host.cache_groups(config, page_tokens)

    def load(self, checkpoint: Checkpoint, progress: Progress) -> Weights:
        weights = self.host.load(checkpoint, progress)
        for name in tuple(weights.tensors):
            weights.tensors[name] = weights.tensors[name].to(self.device)
        return weights

    def bind(self, weights: LoadedWeights, *, num_pages: int, page_tokens: int) -> BoundModel:
        if not isinstance(weights, Weights):
            raise InvariantBroken("weights of another factory", kind=type(weights).__name__)
        groups = self.host.cache_groups(weights.config, page_tokens)
        model = bind_model(weights, num_pages=num_pages, page_tokens=page_tokens, kernels=self.kernels)
        step = capture_decodes(
            model.step,
            sizes=self.sizes,
            widths=tuple(-(-self.longest // group.block_tokens) for group in groups),
            device=self.device,
            capture=self.capture(),
        )
        if isinstance(model.pool, KvPool) and num_pages > len(SWAP):
            # Compiles the copies: a warm-up of requests copies no page. All pages are zeros yet.
            model.pool.copy_blocks(SWAP)
        return CudaBound(step=step, pool=model.pool)


@attrs.frozen(kw_only=True, eq=False)
class SamplerOnDevice:
    """`device.parts.SamplerFactory`."""

    api: CudaApi
    kernels: Kernels

    def __call__(self, *, slots: int, vocab_size: int) -> Sampler:
        return device_sampler(
            slots=slots, vocab_size=vocab_size, kernel=self.kernels.sample, to_device=self.api.to_device
        )


def cuda_parts(
    settings: Settings, checkpoint: Checkpoint, given: DeviceParts, driver: Callable[[], TorchCuda] = torch_cuda
) -> DeviceParts:
    """`given`, completed with the parts of a CUDA device.

    Raises: NotSupported: this torch has no CUDA, or sees no device; or the model has a part that has no
        kernel there. SettingsError: what the settings ask for is for another device.
    """
    check_cuda(settings, checkpoint)
    api, kernels = driver(), kernels_for("cuda")
    model = CudaModel(
        device=api.device,
        kernels=kernels,
        capture=torch_capture,
        longest=longest_wanted(settings, checkpoint.config.max_positions),
        sizes=powers_of_two(settings.scheduler.max_num_seqs),
    )
    return attrs.evolve(
        given,
        backend=given.backend or partial(open_cuda_backend, watch=given.watch, api=api),
        model=given.model or model,
        sampler=given.sampler or SamplerOnDevice(api=api, kernels=kernels),
        machine=given.machine or cuda_machine(api.device),
        tier=given.tier or TierParts(counters=partial(CudaLayersArrived, api=api), mover=DriverMover(), pin=api.pin),
    )


def check_cuda(settings: Settings, checkpoint: Checkpoint) -> None:
    """Raises as `cuda_parts`, but for the device itself."""
    device = settings.device
    if device.executor is Executor.FUTURES:
        raise SettingsError("device.executor: futures is for devices without streams; with cuda it is streams")
    if device.forward is Forward.NATIVE:
        raise SettingsError("device.forward: native is for the cpu; with cuda it is torch or auto")
    cpu_model_factory(attrs.evolve(device, forward=Forward.TORCH))  # refuses weights and KV that torch has not
    if checkpoint.config.linear is not None:
        raise NotSupported(
            f"device.backend: cuda has no kernel for the linear attention of {checkpoint.config.model_type}; use cpu"
        )


def cuda_machine(device: torch.device) -> Machine:
    """The device's free memory; processors are the host's, for loading."""
    free, _ = torch.cuda.mem_get_info(device)
    return attrs.evolve(
        read_machine(), available_bytes=free, memory_source=f"free memory of {torch.cuda.get_device_name(device)}"
    )
