"""What this process may use of the machine: control-group limits, free memory, scheduling mask.

Files are read below a root that the caller names, so that a test can lay out a machine of its own.
Sources: kernel documentation, admin-guide/cgroup-v2 and cgroup-v1/memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


@attrs.frozen(kw_only=True)
class Machine:
    """Limits of this process.

    Attributes:
        available_bytes: memory that can still be taken; None where nothing tells.
        memory_source: where that number is from, for people.
        cpus: processors worth of time, at least 1.
        cpu_source: likewise.
    """

    available_bytes: int | None
    memory_source: str
    cpus: int
    cpu_source: str


@attrs.frozen(kw_only=True)
class _Group:
    """One control group: its folder, and whether it is of version 2."""

    folder: Path
    unified: bool


def scheduling_mask() -> int:
    """Processors this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def wait_policy_hint(environ: Mapping[str, str], *, threads: int) -> str | None:
    """What to tell who has not said what compute threads do between steps; None: somebody has, or there is one.

    Left alone, libgomp's threads spin for milliseconds before they sleep. Nothing but its environment, read when
    it is loaded, can change that, and the environment is that of whoever started the process.
    """
    if threads == 1 or "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ:
        return None
    return (
        "compute threads spin between steps and take the processor from others; "
        "start the process with OMP_WAIT_POLICY=PASSIVE and they sleep"
    )


def read_machine(root: Path = Path("/"), *, mask: int | None = None) -> Machine:
    """Look at the control groups of this process and all groups above them, and at free memory.

    Args:
        mask: size of the scheduling mask; None: this process's.
    """
    processors = scheduling_mask() if mask is None else mask
    available, memory_source = _memory(root)
    cpus, cpu_source = processors, "scheduling mask"
    for group in _groups(root, "cpu"):
        quota = _cpu_quota(group)
        # A fraction of a processor is not enough for one more thread that the others wait for.
        if quota is not None and max(1, int(quota)) < cpus:
            cpus, cpu_source = max(1, int(quota)), f"{group.folder}: {quota:g} processors"
    return Machine(available_bytes=available, memory_source=memory_source, cpus=max(1, cpus), cpu_source=cpu_source)


def _memory(root: Path) -> tuple[int | None, str]:
    found: list[tuple[int, str]] = []
    free = _meminfo(root / "proc/meminfo")
    if free is not None:
        found.append((free, "free memory of the machine"))
    for group in _groups(root, "memory"):
        left = _memory_left(group)
        if left is not None:
            found.append((left, f"{group.folder}: limit less use"))
    return min(found) if found else (None, "nothing tells how much memory there is")


def _groups(root: Path, controller: str) -> Iterator[_Group]:
    """This process's group for `controller` and its ancestors, those that exist.

    In a container the path in /proc may be the host's while the mount shows the container's own
    group as its top; then only the top is found, which is the right one.
    """
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if not names:
            mounts, unified = (base, base / "unified"), True
        elif controller in names.split(","):
            mounts, unified = (base / names, base / controller), False
        else:
            continue
        mount = next((folder for folder in mounts if _is_mount(folder, unified=unified)), None)
        if mount is None:
            continue
        own = Path(path.lstrip("/"))
        for part in (own, *own.parents):
            folder = mount / part
            if ".." not in part.parts and folder.is_dir():
                yield _Group(folder=folder, unified=unified)


def _is_mount(folder: Path, *, unified: bool) -> bool:
    return (folder / "cgroup.controllers").is_file() if unified else folder.is_dir()


def _memory_left(group: _Group) -> int | None:
    """Bytes up to the group's limit. File pages that were not used lately can be taken back."""
    names = ("memory.max", "memory.current", "inactive_file")
    if not group.unified:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit, used = _number(group.folder / names[0]), _number(group.folder / names[1])
    if limit is None or used is None or limit >= UNLIMITED:
        return None
    reclaimable = 0
    for line in _text(group.folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == names[2] and value.strip().isdigit():
            reclaimable = int(value)
    return max(0, limit - max(0, used - reclaimable))


def _cpu_quota(group: _Group) -> float | None:
    """Processors worth of time a period, or None without a limit."""
    if group.unified:
        quota, _, period = _text(group.folder / "cpu.max").strip().partition(" ")
    else:
        quota = _text(group.folder / "cpu.cfs_quota_us").strip()
        period = _text(group.folder / "cpu.cfs_period_us").strip()
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _meminfo(path: Path) -> int | None:
    for line in _text(path).splitlines():
        key, _, rest = line.partition(":")
        amount = rest.split()
        if key == "MemAvailable" and amount and amount[0].isdigit():
            return int(amount[0]) * 1024
    return None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """The file's text; "" where it is missing or may not be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
