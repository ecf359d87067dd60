"""Pages of other origins that may call this server. Without any named, a browser lets none read an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from headrace.errors import RequestError
from headrace.server.formats import error_body

EXPOSED = (
    "x-request-id", "retry-after", "retry-after-ms", "x-queue-ms", "x-queue-position", "x-queue-expected-ms",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)  # fmt: skip


class OriginRefused(RequestError):
    status = 403
    type = "permission_error"
    code = "origin_not_allowed"


class _Cors(CORSMiddleware):
    """The library's, with its refusals in the form of all errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        error = OriginRefused("this origin, method or header is not allowed; --cors-origin names origins")
        return Response(error_body(error), error.status, media_type="application/json", headers={"vary": "Origin"})


def with_cors(app: Any, origins: Sequence[str]) -> Any:
    """`app` for these origins too; no origins: `app` itself."""
    if not origins:
        return app
    return _Cors(app, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=EXPOSED, max_age=600)
