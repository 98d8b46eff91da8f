"""`/dashboard`: one page for an operator, and the figures that it asks for every second.

The page needs no key and holds nothing; its figures need one where the API does. No text of a request is in them.
"""

import time
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from mambalign.engine.server.answer import json_response
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.state import STATE, ServerState

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
}


@cache
def page() -> str:
    return files("mambalign.engine.server").joinpath("dashboard.html").read_text(encoding="utf-8")


async def dashboard(request: web.Request) -> web.Response:
    """A page for an operator's browser."""
    return web.Response(text=page(), content_type="text/html", headers=PAGE_HEADERS)


async def dashboard_data(request: web.Request) -> web.Response:
    """Always answers, with the last known statistics when the engine cannot."""
    state = request.app[STATE]
    await state.refresh_stats()
    return json_response(data(state))


def data(state: ServerState) -> dict[str, Any]:
    """The engine's statistics as `/metrics` has them, the last requests, and whether a request would run now."""
    try:
        state.require_ready()
        status = {"ready": True, "text": "serving"}
    except ApiError as error:
        status = {"ready": False, "text": str(error)}
    ready = state.client.ready
    return {
        "model": state.model_name,
        "status": status,
        "uptime_seconds": time.time() - state.started,
        "spec_tokens": ready.spec_tokens if ready else 0,
        "runner": ready.runner if ready else "",
        "conv_layout": ready.conv_layout if ready else "",
        "stats": msgspec.structs.asdict(state.metrics.engine.stats),
        "requests": [msgspec.structs.asdict(each) for each in reversed(state.recent)],
    }
