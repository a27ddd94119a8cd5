"""What the commit hands to the message of its round."""

from __future__ import annotations

from typing import Any, Protocol

from tokenspeed.plane.messages import Finish, IndexArray, LoadReport, OutputBatch, Refusal, TopLogprobs


class Entries(Protocol):
    """One token for each of some requests, in columns; lists of equal length, whose items are never changed.

    Attributes:
        rows: int64 ``[n]``.
        tokens, lengths, finished: of the latest commit: the token, tokens of output, `Finish` values.
        nothing, zeros, blanks: what a request without log-probabilities and messages has there.
    """

    rows: IndexArray
    rids: list[str]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    tokens: list[int]
    lengths: list[int]
    finished: list[int]
    nothing: list[list[Any]]
    zeros: list[int]
    blanks: list[str]

    def message(self, load: LoadReport | None, engine_index: int) -> OutputBatch:
        """These and nothing else."""
        ...


class OutputSink(Protocol):
    """The round's one message while it is put together; an entry a request, in order of its first event."""

    @property
    def filled(self) -> bool:
        """There is something to send."""
        ...

    def take(self, load: LoadReport | None) -> OutputBatch | None:
        """The message, or None if there is nothing to say; empty afterwards."""
        ...

    def add(self, entries: Entries) -> None:
        """A commit's tokens. Kept as they are until `take` or `detach`."""
        ...

    def detach(self) -> None:
        """Entries that were added may change from here on."""
        ...

    def end(self, row: int, finish: Finish, *, status: int, message: str) -> None:
        """A request ends without another token."""
        ...

    def refuse(self, refusals: tuple[Refusal, ...]) -> None:
        """Requests that were not accepted; they have no row."""
        ...

    def add_logprob(self, row: int, value: float, top: TopLogprobs | None) -> None:
        """Of a token that was added; `top`: the likeliest at its place."""
        ...

    def add_prompt_logprobs(
        self, row: int, values: list[float | None], tops: list[TopLogprobs | None], ids: list[int]
    ) -> None:
        """Of a request that got a token, from the position on that it asked for: values, likeliest, and the ids."""
        ...
