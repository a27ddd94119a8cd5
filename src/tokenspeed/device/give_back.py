"""Memory pages back to the machine, while the addresses stay ours."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import torch

from tokenspeed.errors import NotSupported

_DONTNEED = 4
"""``MADV_DONTNEED`` of <sys/mman.h> on Linux: private anonymous pages are freed at once and read as zeros."""


def give_back(memory: torch.Tensor) -> int:
    """Free the whole pages inside `memory`, which reads as zeros there afterwards; returns their bytes.

    Nothing but `memory` may lie in it, and nobody may read it meanwhile. The parts of pages at its two
    ends stay: they may be shared with a neighbour.

    Raises: NotSupported: not on this system. OSError: the system refuses (locked pages).
    """
    if not sys.platform.startswith("linux"):
        raise NotSupported(f"memory cannot be given back on {sys.platform}")
    page = mmap.PAGESIZE
    begin = -(-memory.data_ptr() // page) * page
    end = (memory.data_ptr() + memory.numel() * memory.element_size()) // page * page
    if end <= begin:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise: {os.strerror(number)}")
    return end - begin
