"""GET /: a page for people that shows `/metrics` as numbers and curves. Static; holds nothing of the server."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.frontend.http.api import Api

PAGE = files("tokenspeed.frontend.http").joinpath("status.html").read_bytes()
# Nothing from elsewhere is loaded, whatever a label of a metric says.
POLICY = "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


async def status_page(_api: Api, _request: Request) -> Response:
    return Response(PAGE, media_type="text/html", headers={"content-security-policy": POLICY})
