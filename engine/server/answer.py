"""From a running generation to an HTTP answer: one JSON body, or server-sent events."""

import asyncio
import contextlib
import socket
import struct
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from mambalign.engine.messages import EngineOutput
from mambalign.engine.server.access import LOG_FIELDS
from mambalign.engine.server.errors import ApiError, as_api_error
from mambalign.engine.server.generation import Choice, Generation, log_fields
from mambalign.engine.server.protocol import GenerationBody
from mambalign.engine.server.state import ServerState
from mambalign.engine.server.token_text import prompt_logprobs

SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class Answer:
    """The shape of one endpoint's answer; a subclass says how a choice looks, whole and in a chunk."""

    object_name: str  # of a whole answer
    chunk_object_name: str

    def __init__(self, state: ServerState, body: GenerationBody, prefix: str):
        self.state = state
        self.body = body
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def chunk_choices(self, choice: Choice, output: EngineOutput) -> list[dict[str, Any]]:
        """What one step's news of a choice becomes: a chunk each, none when nothing is to be said yet."""
        raise NotImplementedError

    def best_choices(self, choices: list[Choice]) -> list[Choice]:
        """Those that a whole answer shows."""
        return choices

    def of_prompt(self, choice: Choice) -> dict[str, Any]:
        """What `return_token_ids` and `prompt_logprobs` say of the prompt; in a stream, in a choice's first chunk."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = choice.prompt_token_ids
        if self.body.prompt_logprobs is not None and choice.prompt_logprobs is not None:
            lists = prompt_logprobs(self.state.token_text, choice.prompt_token_ids, choice.prompt_logprobs)
            fields["prompt_logprobs"] = lists
        return fields

    def envelope(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.state.model_name,
            "choices": choices,
        }

    def token_ids(self, ids: list[int]) -> dict[str, Any]:
        """What `return_token_ids` says of the text, or of its part in a chunk."""
        return {"token_ids": ids} if self.body.return_token_ids else {}

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self.whole_choice(choice) for choice in self.best_choices(generation.choices)]
        return self.envelope(self.object_name, choices) | {"usage": self.usage(generation)}

    def usage(self, generation: Generation) -> dict[str, Any]:
        return generation.usage()

    # a stream's events

    @property
    def _includes_usage(self) -> bool:
        options = self.body.stream_options
        return bool(options and options.include_usage)

    def begin(self) -> list[bytes]:
        """Before the first news."""
        return []

    def news(self, choice: Choice, output: EngineOutput) -> list[bytes]:
        usage = {"usage": None} if self._includes_usage else {}
        chunks = [self.envelope(self.chunk_object_name, [part]) for part in self.chunk_choices(choice, output)]
        return [event(chunk | usage) for chunk in chunks]

    def end(self, generation: Generation) -> list[bytes]:
        last = [event(b"[DONE]")]
        if self._includes_usage:
            last.insert(0, event(self.envelope(self.chunk_object_name, []) | {"usage": self.usage(generation)}))
        return last

    def failed(self, error: ApiError, generation: Generation) -> list[bytes]:
        """The stream's last words when it cannot go on."""
        return [event(error.body())]

    def has_news(self, output: EngineOutput) -> bool:
        """A step may bring no text yet (part of a character or of a stop string)."""
        wants_tokens = self.body.return_token_ids or output.new_logprobs is not None
        return bool(output.new_text or output.finish_reason or (wants_tokens and output.new_token_ids))


def check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")


async def send_answer(request: web.Request, answer: Answer, generation: Generation) -> web.StreamResponse:
    """Run the generation to its end and answer. If the client leaves, or time is up, the generation is aborted."""
    state = answer.state
    try:
        async with contextlib.aclosing(generation.run()) as news:
            if answer.body.stream:
                return await stream_answer(request, answer, generation, news)
            async with asyncio.timeout_at(generation.deadline):
                async for _ in news:
                    pass
            return json_response(answer.whole(generation))
    finally:
        request[LOG_FIELDS] = log_fields(generation, answer.body, state.tokenizer, state.options.log_prompts)


async def stream_answer(
    request: web.Request, answer: Answer, generation: Generation, news: AsyncIterator[tuple[Choice, EngineOutput]]
) -> web.StreamResponse:
    stream = EventStream(request, answer.state.options.write_timeout)
    try:
        async with asyncio.timeout_at(generation.deadline):
            async for choice, output in news:
                if not stream.has_begun:  # not before the first news: an early error has a status
                    await stream.begin()
                    await stream.write(answer.begin())
                await stream.write(answer.news(choice, output))
        await stream.write(answer.end(generation))
    except ConnectionError:  # the client has gone
        return stream.response
    except Exception as error:
        if not stream.has_begun:
            raise
        with contextlib.suppress(ConnectionError):
            await stream.write(answer.failed(as_api_error(error), generation))
    with contextlib.suppress(ConnectionError):
        await stream.response.write_eof()
    return stream.response


class EventStream:
    """Server-sent events for a client that reads them: one that does not for `write_timeout` seconds is cut off."""

    def __init__(self, request: web.Request, write_timeout: float):
        self.response = web.StreamResponse(headers=SSE_HEADERS)
        self.has_begun = False
        self._request = request
        self._write_timeout = write_timeout

    async def begin(self) -> None:
        self.has_begun = True
        await self.response.prepare(self._request)

    async def write(self, events: list[bytes]) -> None:
        """Raises ConnectionError when the client has gone, or was cut off."""
        if not events:
            return
        writing = asyncio.timeout(self._write_timeout)
        try:
            async with writing:
                await self.response.write(b"".join(events))
        except TimeoutError:
            self._cut_off()
            raise ConnectionResetError("the client reads nothing") from None

    def _cut_off(self) -> None:
        """Close the connection and drop what is unsent, also what the kernel still holds."""
        transport = self._request.transport
        if transport is not None:
            at_once = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            transport.abort()


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    data = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return b"data: %b\n\n" % data if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
