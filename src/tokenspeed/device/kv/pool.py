"""The paged KV pool.

Layout: one float32 tensor ``[num_pages, layers, 2, kv_heads, page_tokens, head_dim]``, keys at 0 and
values at 1 of the third dimension. A page is one run of ``bytes_per_page`` bytes over all layers, so
that copies, transfers and the host tier move it whole, and one layer of a page is one run inside it.
Within a layer the tokens of one head are next to each other, which is what attention reads.

Where the pool shares its memory with other cache groups (`kv.grouped`), pages have other blocks or
padding between them, always so that a page begins at a multiple of a run.

Page 0 is the null page: it is zero, belongs to nobody and is never written. Block tables are padded
with it, so a padded read finds numbers, and a masked weight of 0 times them is 0.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from tokenspeed.checkpoint.config import ModelConfig
from tokenspeed.device.kernels.registry import Kernels
from tokenspeed.errors import InvariantBroken
from tokenspeed.plane.plan import BlockCopy, GroupBlocks

NULL_PAGE = 0


@attrs.frozen(kw_only=True, eq=False)
class KvPool:
    """Pages of one model's keys and values. Build it with `kv_pool`; called from the exec stream's jobs.

    Attributes:
        pages: float32, laid out as the module says; dense but for the first dimension. Its memory is
            taken page by page, at the first write.
    """

    pages: torch.Tensor
    kernels: Kernels

    @property
    def num_pages(self) -> int:
        """The null page included."""
        return self.pages.shape[0]

    @property
    def page_tokens(self) -> int:
        return self.pages.shape[4]

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes

    def copy_blocks(self, copies: tuple[BlockCopy, ...]) -> None:
        """Copy pages as if every source were read before the first write (RA-33).

        Raises: InvariantBroken: a page outside the pool, the null page, or one destination twice.
        """
        pairs = tuple((copy.source, copy.destination) for copy in copies)
        destinations = {destination for _, destination in pairs}
        if len(destinations) != len(pairs):
            raise InvariantBroken("a page is the destination of two copies", pairs=pairs)
        self._check(tuple(page for pair in pairs for page in pair), *(copy.group for copy in copies))
        with torch.inference_mode():
            self.kernels.copy_pages(self.pages, pairs)

    def zero_blocks(self, blocks: tuple[GroupBlocks, ...]) -> None:
        """Zero whole pages. Raises InvariantBroken: a page outside the pool, or the null page."""
        pages = tuple(page for group in blocks for page in group.blocks)
        self._check(pages, *(group.group for group in blocks))
        with torch.inference_mode():
            self.kernels.zero_pages(self.pages, pages)

    def layer_bytes(self, group: int) -> torch.Tensor:
        self._check((), group)
        return self.pages.flatten(2).view(torch.uint8)

    def runs(self, layer: int) -> torch.Tensor:
        """A layer's view of the pool by heads: row ``page * stride + h`` is head h's run of that page.

        ``h < kv_heads`` are keys, ``kv_heads <= h < 2 * kv_heads`` values; `run_stride` is the stride.
        Returns: float32 ``[*, page_tokens * head_dim]``.
        """
        _, _, _, _, tokens, dim = self.pages.shape
        return self._rows(layer, tokens * dim)

    def vectors(self, layer: int) -> torch.Tensor:
        """The same by tokens: row ``(page * stride + h) * page_tokens + offset``; float32 ``[*, head_dim]``."""
        return self._rows(layer, self.pages.shape[5])

    @property
    def run_stride(self) -> int:
        """Runs from one page to the next: those of one page over all layers, and what padding has room for."""
        _, _, _, _, tokens, dim = self.pages.shape
        return self.pages.stride(0) // (tokens * dim)

    def _rows(self, layer: int, width: int) -> torch.Tensor:
        """From `layer` of the null page to the last page's, float32 ``[*, width]``."""
        pages, (per_page, per_layer) = self.pages, self.pages.stride()[:2]
        end = (self.num_pages - 1) * per_page + pages.shape[1] * per_layer
        first = layer * per_layer
        return pages.as_strided(((end - first) // width, width), (width, 1), pages.storage_offset() + first)

    def _check(self, blocks: tuple[int, ...], *groups: int) -> None:
        if any(groups):
            raise InvariantBroken("a cache group that the model does not have", groups=groups)
        if blocks and not NULL_PAGE < min(blocks) <= max(blocks) < self.num_pages:
            raise InvariantBroken("a page outside the pool, or the null page", pages=blocks, num_pages=self.num_pages)


HOST = torch.device("cpu")


def kv_pool(
    config: ModelConfig, *, num_pages: int, page_tokens: int, kernels: Kernels, device: torch.device = HOST
) -> KvPool:
    """An empty pool of `num_pages` pages, the null page among them.

    Raises: InvariantBroken: fewer than two pages, or pages of no tokens.
    """
    if num_pages < 2 or page_tokens < 1:
        raise InvariantBroken("a KV pool without a usable page", num_pages=num_pages, page_tokens=page_tokens)
    shape = (num_pages, config.num_layers, 2, config.num_kv_heads, page_tokens, config.head_dim)
    with torch.inference_mode(mode=False):  # an ordinary tensor, which streams may write in any mode
        if device.type != "cpu":
            return KvPool(pages=torch.zeros(shape, dtype=torch.float32, device=device), kernels=kernels)
        # Zeros that the kernel maps when a page is first used: the pool costs memory as it fills, and no
        # start-up time. `torch.zeros` would write all of it.
        return KvPool(pages=torch.from_numpy(np.zeros(shape, dtype=np.float32)), kernels=kernels)
