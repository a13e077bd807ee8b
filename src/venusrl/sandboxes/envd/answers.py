"""The JSON bodies that E2B's clients tell failures apart by.

Owns: their exact wording. Shared by the services inside (``envd``) and the gateway in front of them.

Must not know: when which is sent.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

NOT_FOUND = "The sandbox was not found"
PORT_CLOSED = "The sandbox is running but port is not open"
MOVED = "The sandbox moved before it had answered. What was asked may have begun: ask again where that does no harm."
TRANSITIONING = "The sandbox is still transitioning. Try again in a moment."
TRAFFIC_HEADER = "e2b-traffic-access-token"
NO_TRAFFIC_TOKEN = f"Sandbox is secured with traffic access token. Token header '{TRAFFIC_HEADER}' is missing"
BAD_TRAFFIC_TOKEN = (
    f"Sandbox is secured with traffic access token. Provided token in header '{TRAFFIC_HEADER}' is invalid"
)
UNAUTHORIZED = "unauthorized access, please provide a valid access token or method signing if supported"


def sandbox_answer(
    status: int, sandbox: str, message: str, headers: dict[str, str] | None = None, **more: Any
) -> web.Response:
    """What a gateway says about a sandbox."""
    body = {"sandboxId": sandbox, "message": message, "code": status, **more}
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json", headers=headers)


def error_answer(status: int, message: str) -> web.Response:
    """What the services inside answer outside of Connect."""
    body = {"code": status, "message": message}
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
