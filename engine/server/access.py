"""Who may call, from where, and what is written about it: API keys, CORS, request ids, the access log."""

import asyncio
import datetime
import logging
import re
import sys
import time
import uuid
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractAccessLogger

from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.state import STATE

OPEN_PATHS = ("/health", "/metrics", "/dashboard")  # without a key: probes, scrapers and browsers have none
QUIET_PATHS = (*OPEN_PATHS, "/dashboard/data")  # asked for again and again
REQUEST_ID = "X-Request-Id"
REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,128}")
PREFLIGHT_SECONDS = "600"  # how long a browser may remember what it may send
CLIENT_LEFT = 499  # the status, in the log only, of a request whose client did not wait for the answer
ACCESS_LOGGER = "mambalign.access"
LOG_FIELDS = "log"  # of a request: what its handler knows for the access log


@web.middleware
async def request_id_middleware(request: web.Request, handler: web.RequestHandler) -> web.StreamResponse:
    """Every request has an id: the client's own, if it fits a header, else a new one."""
    given = request.headers.get(REQUEST_ID, "")
    request[REQUEST_ID] = given if REQUEST_ID_PATTERN.fullmatch(given) else f"req-{uuid.uuid4().hex}"
    started = time.monotonic()
    try:
        return await handler(request)
    except asyncio.CancelledError:  # the client has left: the server itself writes no line about it
        write_entry(logging.getLogger(ACCESS_LOGGER), request, CLIENT_LEFT, time.monotonic() - started)
        raise


@web.middleware
async def auth_middleware(request: web.Request, handler: web.RequestHandler) -> web.StreamResponse:
    keys = request.app[STATE].api_keys
    if keys and request.path not in OPEN_PATHS and not keys.allow(request.headers.get(hdrs.AUTHORIZATION, "")):
        raise ApiError(
            401,
            "this server needs its API key: send `Authorization: Bearer KEY`",
            code="invalid_api_key",
            kind="authentication_error",
        )
    return await handler(request)


@web.middleware
async def cors_middleware(request: web.Request, handler: web.RequestHandler) -> web.StreamResponse:
    """Answer a browser's question whether it may send a request; it brings no key."""
    method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
    if request.method == "OPTIONS" and method and allowed_origin(request):
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
            hdrs.ACCESS_CONTROL_MAX_AGE: PREFLIGHT_SECONDS,
        }
        if wanted := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
        return web.Response(status=204, headers=headers)
    return await handler(request)


def allowed_origin(request: web.Request) -> str | None:
    """The request's origin if browsers may read answers there."""
    origin, allowed = request.headers.get(hdrs.ORIGIN), request.app[STATE].cors_origins
    return origin if origin and ("*" in allowed or origin in allowed) else None


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every answer: the request's id, and what a browser wants to see."""
    if REQUEST_ID in request:
        response.headers[REQUEST_ID] = request[REQUEST_ID]
    if request.app[STATE].cors_origins:
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if origin := allowed_origin(request):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = f"{REQUEST_ID}, {hdrs.RETRY_AFTER}"


def make_access_logger(level: int) -> logging.Logger:
    """Writes lines to standard error as they are: each is a JSON object."""
    logger = logging.getLogger(ACCESS_LOGGER)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)
    return logger


def write_entry(logger: logging.Logger, request: web.BaseRequest, status: int, seconds: float) -> None:
    level = logging.DEBUG if request.path in QUIET_PATHS else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "request_id": request.get(REQUEST_ID),
        "remote": request.remote,
        "method": request.method,
        "path": request.path,
        "status": status,
        "seconds": round(seconds, 6),
    }
    logger.log(level, msgspec.json.encode(fields | request.get(LOG_FIELDS, {})).decode())


class AccessLog(AbstractAccessLogger):
    """One JSON object a request, without texts unless asked for; what is asked again and again only at level debug."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        write_entry(self.logger, request, response.status, time)
