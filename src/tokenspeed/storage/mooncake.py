"""Mooncake's distributed store as a backend: pages in the memory of the machines that take part.

Source: the Python interface of `mooncake.store` (the package mooncake-transfer-engine). A call into it releases
the interpreter's lock. Frames lie in registered memory, so nothing is copied on the way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, cast

import attrs

from tokenspeed.errors import SettingsError
from tokenspeed.plane.storage import HostBytes
from tokenspeed.settings.storage import StorageSettings

GIB = 1 << 30
P2P = "P2PHANDSHAKE"
"""Metadata travels between the members, without a server of its own."""


class MooncakeStore(Protocol):
    """What this backend uses of ``mooncake.store.MooncakeDistributedStore``. Codes below 0 are faults."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int: ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """Bytes read of each, or a code."""
        ...

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]: ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int: ...

    def health_check(self) -> int: ...

    def close(self) -> int: ...


@attrs.frozen(kw_only=True, eq=False)
class MooncakeBackend:
    """Meets `plane.storage.StorageBackend`."""

    store: MooncakeStore

    def attach(self, memory: HostBytes) -> None:
        self._sound("register_buffer", self.store.register_buffer(memory.ctypes.data, memory.nbytes))

    def exists(self, keys: Sequence[str]) -> list[bool]:
        codes = self.store.batch_is_exist(list(keys))
        self._not_all_faults("batch_is_exist", codes)
        return [code == 1 for code in codes]

    def get(self, keys: Sequence[str], frames: Sequence[HostBytes]) -> list[bool]:
        addresses, sizes = _places(frames)
        read = self.store.batch_get_into(list(keys), addresses, sizes)
        if not any(code > 0 for code in read):
            self._sound("health_check", -self.store.health_check())  # a miss is a code below 0, too
        return [code == size for code, size in zip(read, sizes, strict=True)]

    def put(self, keys: Sequence[str], frames: Sequence[HostBytes]) -> list[bool]:
        codes = self.store.batch_put_from(list(keys), *_places(frames))
        self._not_all_faults("batch_put_from", codes)
        return [code == 0 for code in codes]

    def delete(self, keys: Sequence[str]) -> None:
        self.store.batch_remove(list(keys), True)

    def clear(self, namespace: str) -> None:
        self._sound("remove_by_regex", self.store.remove_by_regex(f"^{re.escape(namespace)}/.*", True))

    def close(self) -> None:
        self.store.close()

    def _not_all_faults(self, what: str, codes: list[int]) -> None:
        if codes and all(code < 0 for code in codes):
            self._sound(what, codes[0])

    def _sound(self, what: str, code: int) -> None:
        """Raises: OSError: `code` is a fault."""
        if code < 0:
            raise OSError(f"mooncake: {what} gives {code}")


def open_mooncake(settings: StorageSettings) -> MooncakeBackend:
    """Raises: SettingsError: the package or one of its libraries is not there, or the store cannot be joined."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as fault:
        raise SettingsError(
            f"storage.backend: mooncake cannot be loaded ({fault}); install the extra `mooncake`, and libibverbs1"
        ) from fault
    store = cast("MooncakeStore", MooncakeDistributedStore())
    code = store.setup(
        settings.mooncake_host,
        settings.mooncake_metadata or P2P,
        int(settings.max_gib * GIB),
        BUFFER_BYTES,
        settings.mooncake_protocol.value,
        settings.mooncake_devices,
        settings.mooncake_master,
    )
    if code:
        raise SettingsError(
            f"storage.mooncake_master: the store at {settings.mooncake_master} cannot be joined (code {code})"
        )
    return MooncakeBackend(store=store)


BUFFER_BYTES = 16 << 20
"""That the store keeps for itself beside the frames."""


def _places(frames: Sequence[HostBytes]) -> tuple[list[int], list[int]]:
    return [frame.ctypes.data for frame in frames], [frame.nbytes for frame in frames]
