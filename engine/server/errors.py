"""Errors as OpenAI clients expect them: a status, and {"error": {message, type, param, code}}."""

import logging

import msgspec
from aiohttp import hdrs, web

from mambalign.engine.errors import EngineDeadError, EngineError, RequestError

log = logging.getLogger("mambalign.server")


class ApiError(Exception):
    """Ends a request with an HTTP status. `param` names the field of the body that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = headers or {}

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def response(self) -> web.Response:
        headers = self.headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=headers)


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, kind="service_unavailable_error")


def as_api_error(error: Exception) -> ApiError:
    """What a handler's exception is to the client. An exception that nobody expected is logged and a 500."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return value_error(error)
        case EngineDeadError():
            return unavailable(str(error), "engine_unavailable")
        case EngineError():
            return ApiError(500, str(error), code="engine_error", kind="server_error")
        case RecursionError():  # nothing else of a request is nested
            return ApiError(400, "the body is nested too deeply")
        case TimeoutError():
            return ApiError(
                504, "the request took longer than this server allows", code="timeout", kind="timeout_error"
            )
        case web.HTTPRequestEntityTooLarge():
            limit = f"the body is larger than this server takes: {error.text}"
            return ApiError(413, limit, code="body_too_large")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            text = f"{error.method} is not a method of this path: use {allowed}"
            return ApiError(405, text, code="405", headers={hdrs.ALLOW: allowed})
        case web.HTTPException():
            return ApiError(error.status, error.text or error.reason, code=str(error.status))
    log.error("a handler failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error", kind="server_error")


def value_error(error: ValueError) -> ApiError:
    """A 400 from a text that starts with the field's name, as `SamplingParams.validate` writes it."""
    text = str(error)
    return ApiError(400, text, param=text.replace(":", " ").split()[0] if text else None)


@web.middleware
async def error_middleware(request: web.Request, handler: web.RequestHandler) -> web.StreamResponse:
    """Every error of every path in OpenAI's shape."""
    try:
        return await handler(request)
    except Exception as error:
        if isinstance(error, web.HTTPException) and error.status < 400:
            raise
        api_error = as_api_error(error)
        request["log"] = request.get("log", {}) | {"error": api_error.code or api_error.kind, "param": api_error.param}
        if api_error.status == 404 and api_error.code == "404":
            api_error.message = f"no such path: {request.method} {request.path}"
        return api_error.response()
