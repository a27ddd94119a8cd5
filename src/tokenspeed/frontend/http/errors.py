"""Errors as the API tells them: ``{"error": {"message", "type", "param", "code"}}`` and a status that fits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tokenspeed.errors import EngineDead, NotSupported, RequestError
from tokenspeed.plane.checks import Fault

log = logging.getLogger("tokenspeed.http")

JSON = "application/json"
RETRY_AFTER_S = 1
SHOWN_FAULTS = 8
MAX_MESSAGE_CHARS = 8192
CLIENT_CLOSED = 499
"""Told and counted for a request whose client left before its response began; nobody gets it."""

_KINDS: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        400: ("invalid_request_error", "invalid_value"),
        401: ("authentication_error", "invalid_api_key"),
        403: ("permission_error", "forbidden"),
        404: ("not_found_error", "not_found"),
        405: ("invalid_request_error", "method_not_allowed"),
        408: ("timeout_error", "request_timeout"),
        409: ("conflict_error", "conflict"),
        413: ("invalid_request_error", "request_too_large"),
        415: ("invalid_request_error", "unsupported_media_type"),
        429: ("rate_limit_error", "overloaded"),
        500: ("server_error", "internal_error"),
        503: ("service_unavailable_error", "unavailable"),
    }
)
"""Status -> (type, code)."""

DOCUMENTED_STATUSES = tuple(_KINDS)


class HttpError(RequestError):
    """A `RequestError` with a code of its own, or headers."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        field: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message, status=status, field=field)
        self.code = code
        self.headers = headers


class ClientGone(Exception):
    """The client closed its connection: nobody is there to answer.

    Attributes:
        in_call: a call was running, which its service has told of.
    """

    def __init__(self, *, in_call: bool = False) -> None:
        super().__init__("the client is gone")
        self.in_call = in_call


class CallFailed(Exception):
    """What ended a call, which its service has told of."""

    def __init__(self, why: Exception) -> None:
        super().__init__(str(why))
        self.why = why


class ErrorInfo(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    error: ErrorInfo


@attrs.frozen(kw_only=True)
class Failure:
    """An exception translated: what to answer, before or within a response."""

    status: int
    body: ErrorBody
    headers: tuple[tuple[str, str], ...] = ()

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body)

    def response(self) -> Response:
        return Response(self.encoded(), self.status, dict(self.headers), media_type=JSON)


def faulty(faults: Sequence[Fault]) -> RequestError:
    """The 400 for a request with `faults`; names all, up to a bound."""
    told = "; ".join(str(fault) for fault in faults[:SHOWN_FAULTS])
    more = len(faults) - SHOWN_FAULTS
    return RequestError(told + (f"; and {more} more" if more > 0 else ""), field=faults[0].field)


def failure(exc: BaseException) -> Failure:
    """What to tell a client of `exc`. An unexpected one is logged with its trace and told without details."""
    match exc:
        case HttpError():
            return _failure(exc.status, str(exc), field=exc.field, code=exc.code, headers=exc.headers)
        case RequestError():
            return _failure(exc.status, str(exc), field=exc.field)
        case EngineDead():
            return _failure(503, f"the engine is not available: {exc}")
        case NotSupported():
            return _failure(400, str(exc), code="not_supported")
        case RecursionError():
            return _failure(400, "the body is nested too deeply")
        case HTTPException():
            headers = tuple((exc.headers or {}).items())
            return _failure(exc.status_code, exc.detail, headers=headers)
        case _:
            log.error("unexpected failure while answering a request", exc_info=exc)
            return _failure(500, "the server failed to answer this request; its log has the reason")


def _failure(
    status: int,
    message: str,
    *,
    field: str | None = None,
    code: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> Failure:
    kind, usual = _KINDS.get(status, _KINDS[400 if status < 500 else 500])
    if status in (429, 503):
        headers = (*headers, ("Retry-After", str(RETRY_AFTER_S)))
    if status == 401:
        headers = (*headers, ("WWW-Authenticate", "Bearer"))
    info = ErrorInfo(message=_clean(message), type=kind, param=_clean(field or "") or None, code=code or usual)
    return Failure(status=status, body=ErrorBody(error=info), headers=headers)


def _clean(text: str) -> str:
    """`text` without what UTF-8 cannot hold, and not endless: clients' own words are in it."""
    return text[:MAX_MESSAGE_CHARS].encode("utf-8", "backslashreplace").decode()
