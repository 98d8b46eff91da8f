"""From a running generation to an HTTP answer: one JSON body, or server-sent events."""

import contextlib
import time
import uuid
from typing import Any

import msgspec
from aiohttp import web

from mambalign.engine.messages import EngineOutput
from mambalign.engine.server.errors import ApiError, as_api_error
from mambalign.engine.server.generation import Choice, Generation
from mambalign.engine.server.protocol import GenerationBody
from mambalign.engine.server.state import ServerState

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

    def envelope(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.state.model_name,
            "choices": choices,
        }

    def token_ids(self, choice: Choice, ids: list[int]) -> dict[str, Any]:
        """The fields that `return_token_ids` adds."""
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": ids, "prompt_token_ids": choice.prompt_token_ids}

    def has_news(self, output: EngineOutput) -> bool:
        """A step may bring no text yet (part of a character or of a stop string)."""
        wants_tokens = self.body.return_token_ids or output.new_logprobs is not None
        return bool(output.new_text or output.finish_reason or (wants_tokens and output.new_token_ids))


def check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")


async def send_answer(request: web.Request, answer: Answer, generation: Generation) -> web.StreamResponse:
    """Run the generation to its end and answer. If the client leaves, the generation is aborted."""
    async with contextlib.aclosing(generation.run()) as news:
        if not answer.body.stream:
            async for _ in news:
                pass
            choices = [answer.whole_choice(choice) for choice in generation.choices]
            whole = answer.envelope(answer.object_name, choices) | {"usage": generation.usage()}
            return json_response(whole)
        options = answer.body.stream_options
        include_usage = bool(options and options.include_usage)
        response: web.StreamResponse | None = None  # not before the first news: an early error has a status
        try:
            async for choice, output in news:
                if response is None:
                    response = web.StreamResponse(headers=SSE_HEADERS)
                    await response.prepare(request)
                for chunk_choice in answer.chunk_choices(choice, output):
                    chunk = answer.envelope(answer.chunk_object_name, [chunk_choice])
                    await write_event(response, chunk | ({"usage": None} if include_usage else {}))
            if include_usage:
                chunk = answer.envelope(answer.chunk_object_name, [])
                await write_event(response, chunk | {"usage": generation.usage()})
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:  # the client has gone
            return response
        except Exception as error:
            if response is None:
                raise
            await response.write(b"data: %b\n\n" % as_api_error(error).body())
        await response.write_eof()
        return response


async def write_event(response: web.StreamResponse, value: Any) -> None:
    await response.write(b"data: %b\n\n" % msgspec.json.encode(value))


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
