"""Responses kept to be asked for, continued or cancelled; bounded in number and size."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine

import attrs
import msgspec

from tokenspeed.errors import RequestError
from tokenspeed.frontend.http.responses_chat import Message
from tokenspeed.frontend.http.responses_schema import ResponseReply
from tokenspeed.plane.checks import shown

MAX_BYTES = 64 << 20
"""Of all responses kept, with their conversations, as JSON."""


@attrs.define(eq=False)
class Kept:
    """One response. Writer: its answer.

    Attributes:
        messages: the conversation up to and with this response, without instructions.
        task: what still works on it; None: a client does, or nobody.
        size: bytes.
    """

    reply: ResponseReply
    messages: list[Message]
    task: asyncio.Task[None] | None = None
    size: int = 0


@attrs.define(eq=False)
class StoreState:
    """Writer: ResponseStore. The one that was not used for the longest time comes first."""

    kept: OrderedDict[str, Kept] = attrs.field(factory=OrderedDict[str, Kept])
    size: int = 0


@attrs.frozen(kw_only=True, eq=False)
class ResponseStore:
    """Loop thread only. What does not fit pushes the oldest out; what is worked on stays.

    Attributes:
        limit: responses; 0: none are kept. Those worked on are bounded by the places for requests.
    """

    limit: int
    max_bytes: int = MAX_BYTES
    state: StoreState = attrs.field(factory=StoreState)

    def put(self, kept: Kept) -> None:
        state = self.state
        self._drop(kept.reply.id)
        kept.size = len(msgspec.json.encode((kept.reply, kept.messages)))
        state.kept[kept.reply.id] = kept
        state.size += kept.size
        for ident in [one for one, old in state.kept.items() if old.task is None]:
            if len(state.kept) <= self.limit and state.size <= self.max_bytes:
                break
            self._drop(ident)

    def get(self, ident: str) -> Kept:
        """Raises: RequestError: 404."""
        found = self.state.kept.get(ident)
        if found is None:
            raise RequestError(f"there is no response {shown(ident)}", status=404, field="response_id")
        self.state.kept.move_to_end(ident)
        return found

    def start(self, kept: Kept, work: Coroutine[object, object, None]) -> None:
        """Keep a response that `work` will finish; the store owns the task."""
        kept.task = asyncio.create_task(work, name=f"ts-{kept.reply.id}")
        self.put(kept)

    def finished(self, kept: Kept) -> None:
        """Nothing works on it any more; kept, unless it was deleted meanwhile."""
        kept.task = None
        if kept.reply.id in self.state.kept:
            self.put(kept)

    def delete(self, ident: str) -> None:
        """Raises: RequestError: 404."""
        if (task := self.get(ident).task) is not None:
            task.cancel()
        self._drop(ident)

    def _drop(self, ident: str) -> None:
        if (old := self.state.kept.pop(ident, None)) is not None:
            self.state.size -= old.size
