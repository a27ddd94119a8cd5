"""Names of computed prefixes: chained hashes of a request's tokens, page by page.

The name of a page is ``blake2b(name of the page before it, its tokens, the media in it)``; the chain
begins at a root made of the request's salt, so that equal tokens under another salt, or around
another image, are another prefix. A block of several pages has the name of its last page. The cache
group is not part of a name: each group has an index of its own, and a prompt is hashed once for all
of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from hashlib import blake2b

import attrs

from tokenspeed.plane.table import RequestTable

NAME_BYTES = 16

NAMED_PER_ROUND = 512
"""Pages of a prompt named by one plan while decodes run; about half a millisecond."""
FOUND_PER_HASH = 4
"""Pages that are found in the index in the time that one takes to be hashed."""


def root_name(*, salt: bytes) -> bytes:
    """Where the chains of one salt begin."""
    return hashlib.blake2b(b"\0\0\0\0" + salt, digest_size=NAME_BYTES).digest()


def page_name(parent: bytes, tokens: bytes, media: bytes = b"") -> bytes:
    """`tokens`: the page's ids as little-endian int32. `media`: see `Chains.media`."""
    return hashlib.blake2b(parent + tokens + media, digest_size=NAME_BYTES).digest()


@attrs.define(eq=False)
class ChainState:
    """Writer: Chains. By row: the root, then names of its first pages, as far as they were needed."""

    chains: dict[int, list[bytes]] = attrs.field(factory=dict[int, list[bytes]])


@attrs.frozen(kw_only=True, eq=False)
class Chains:
    page_tokens: int
    table: RequestTable
    state: ChainState = attrs.field(factory=ChainState)

    def of(self, row: int) -> list[bytes]:
        """The chain of `row` so far: ``chain[i]`` names the first `i` pages."""
        chain = self.state.chains.get(row)
        if chain is None:
            chain = self.state.chains[row] = [root_name(salt=self.table.identity.salt[row])]
        return chain

    def upto(self, row: int, pages: int) -> list[bytes]:
        """The chain with at least `pages` names behind the root; the tokens are known by then."""
        chain = self.of(row)
        at = len(chain) - 1
        if at < pages:
            width = 4 * self.page_tokens
            data = self.tokens(row, at * self.page_tokens, pages * self.page_tokens)
            if not self.table.identity.media[row]:
                name = chain[-1]
                for begin in range(0, len(data), width):
                    name = blake2b(name + data[begin : begin + width], digest_size=NAME_BYTES).digest()
                    chain.append(name)
                return chain
            for begin in range(0, len(data), width):
                chain.append(page_name(chain[-1], data[begin : begin + width], self.media(row, at)))
                at += 1
        return chain

    def known(self, row: int, names: Sequence[bytes]) -> None:
        """The names of the row's next pages, from elsewhere."""
        self.of(row).extend(names)

    def behind(self, row: int, position: int) -> bytes:
        """Name of the first `position` tokens, which need not end with a page."""
        pages, rest = divmod(position, self.page_tokens)
        parent = self.upto(row, pages)[pages]
        if not rest:
            return parent
        media = self.media(row, pages) if self.table.identity.media[row] else b""
        return page_name(parent, self.tokens(row, position - rest, position), media)

    def tokens(self, row: int, first: int, last: int) -> bytes:
        """Ids of the positions ``first .. last - 1`` as little-endian int32."""
        return self.table.tokens_of(row)[first:last].astype("<i4", copy=False).tobytes()

    def media(self, row: int, page: int) -> bytes:
        """Digests of the images and the like in a page, each with its place; empty for text."""
        low = page * self.page_tokens
        high = low + self.page_tokens
        parts = [
            (item.first - low).to_bytes(8, "little", signed=True) + item.digest
            for item in self.table.identity.media[row]
            if item.first < high and low < item.first + item.tokens
        ]
        return b"".join(parts)

    def has_media(self, row: int, page: int) -> bool:
        return bool(self.table.identity.media[row]) and bool(self.media(row, page))

    def forget(self, row: int) -> None:
        self.state.chains.pop(row, None)
