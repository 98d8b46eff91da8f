"""A client of any server of OpenAI's protocol: as much of one as `mambalign chat` and `mambalign bench` need."""

import argparse
import json
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp

from mambalign.engine.api_keys import ENVIRONMENT

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_SECONDS = 10.0
LINE_BYTES = 1 << 20  # of one event, at least


def finite(text: str) -> float:
    """An option's number that JSON can hold."""
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {value}")
    return value


class ServerError(RuntimeError):
    """A server that is not there, or that refuses. The text says what to do; `code` is the server's own word for it."""

    def __init__(self, text: str, code: str | None = None):
        super().__init__(text)
        self.code = code


class ApiClient:
    """An async context manager: connections live as long as it is open."""

    def __init__(self, url: str, key: str | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            read_bufsize=LINE_BYTES,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def model_name(self) -> str:
        """Of the first model that the server has. Raises ServerError."""
        answer = await self.ask("GET", "/v1/models")
        try:
            return answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise ServerError(f"{self.url} lists no model: name one with --model") from None

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The whole answer. Raises ServerError."""
        async with self._answer(method, path, body) as response:
            return decode(await response.read(), self.url)

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer as they come, its usage in the last one. Raises ServerError.

        Whoever leaves early closes the connection, which is how a server is told to stop.
        """
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._answer("POST", path, body) as response:
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = decode(data, self.url)
                if isinstance(event, dict) and event.get("error"):
                    raise refusal(event)
                yield event
        raise ServerError(f"{self.url} broke off its answer")

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                if response.status >= 400:
                    raise self._refused(response.status, await response.read())
                yield response
        except aiohttp.InvalidURL as error:
            raise ServerError(f"{self.url} is no address of a server: write one like {DEFAULT_URL}") from error
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno
            reason = os.strerror(number) if number and number > 0 else error.os_error
            raise ServerError(f"no server at {self.url} ({reason}): start one with `serve`, or give --url") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerError(f"{self.url} broke off: {error or type(error).__name__}") from error

    def _refused(self, status: int, body: bytes) -> ServerError:
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if status == 401:
            return ServerError(f"{self.url} refuses this key: give one by --api-key or {ENVIRONMENT}")
        if isinstance(answer, dict) and answer.get("error"):
            return refusal(answer)
        return ServerError(f"{self.url} answers with status {status}: is it a server of OpenAI's protocol?")


def refusal(answer: dict[str, Any]) -> ServerError:
    """OpenAI's {"error": {"message", "code", ...}}, and what some servers make of it."""
    error = answer["error"]
    if not isinstance(error, dict):
        return ServerError(str(error))
    code = error.get("code")
    return ServerError(str(error.get("message", error)), None if code is None else str(code))


def decode(data: bytes, url: str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise ServerError(f"{url} answers with what is no JSON: is it a server of OpenAI's protocol?") from None


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and who asks it."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", default=DEFAULT_URL, help=f"of the server (default: {DEFAULT_URL})")
    group.add_argument("--model", metavar="NAME", help="to ask (default: the first that the server lists)")
    group.add_argument(
        "--api-key", metavar="KEY", help=f"to show (default: the first of {ENVIRONMENT}, if that is set)"
    )


def api_key(option: str | None) -> str | None:
    """`--api-key`, else the first of the environment's, which may hold all of a server's."""
    return option or os.environ.get(ENVIRONMENT, "").split(",")[0].strip() or None
