"""/v1/responses: one assistant message a response, whole or as OpenAI's typed events. Nothing is stored."""

import time
from typing import Any

from aiohttp import web

from mambalign.engine.messages import EngineOutput, TokenLogprobs
from mambalign.engine.server.answer import Answer, event, send_answer
from mambalign.engine.server.chat_template import TemplateOptions
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.generation import Choice, Generation, fit_params
from mambalign.engine.server.protocol import parse_body
from mambalign.engine.server.response_body import ResponseBody
from mambalign.engine.server.state import STATE, ServerState
from mambalign.engine.server.token_text import chat_logprobs


class ResponseAnswer(Answer):
    """The response object and its stream: created, in progress, one message with one text, completed."""

    def __init__(self, state: ServerState, body: ResponseBody):
        super().__init__(state, body, "resp")
        self._item_id = "msg" + self.id.removeprefix("resp")
        self._num_events = 0

    def whole(self, generation: Generation) -> dict[str, Any]:
        (choice,) = generation.choices
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        return self._response(status, [self._item(status, self._part(choice))], generation)

    def begin(self) -> list[bytes]:
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress")),
            self._in_part("response.content_part.added", part=self._part()),
        ]

    def news(self, choice: Choice, output: EngineOutput) -> list[bytes]:
        logprobs = self._logprobs(output.new_token_ids, output.new_logprobs)
        if not output.new_text and not logprobs:
            return []
        return [self._in_part("response.output_text.delta", delta=output.new_text, logprobs=logprobs)]

    def end(self, generation: Generation) -> list[bytes]:
        whole = self.whole(generation)
        (item,) = whole["output"]
        (part,) = item["content"]
        return [
            self._in_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._in_part("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def failed(self, error: ApiError, generation: Generation) -> list[bytes]:
        item = self._item("incomplete", self._part(generation.choices[0]))
        response = self._response("failed", [item], generation)
        response["error"] = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=response)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1, **fields}, kind)

    def _in_part(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _logprobs(self, ids: list[int], logprobs: list[TokenLogprobs] | None) -> list[dict[str, Any]]:
        if not self.body.wants_logprobs or not logprobs:
            return []
        return chat_logprobs(self.state.token_text, ids, logprobs, self.body.top_logprobs or 0)["content"]

    def _part(self, choice: Choice | None = None) -> dict[str, Any]:
        """The message's text; empty while there is no choice yet."""
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        if choice is not None:
            part |= {"text": choice.text, "logprobs": self._logprobs(choice.token_ids, choice.logprobs)}
        return part

    def _item(self, status: str, *parts: dict[str, Any]) -> dict[str, Any]:
        message = {"id": self._item_id, "type": "message", "role": "assistant"}
        return message | {"status": status, "content": list(parts)}

    def _response(self, status: str, output: list[Any], generation: Generation | None = None) -> dict[str, Any]:
        """The response object: what was asked, at the values that hold, and what came."""
        body, is_cut = self.body, status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": time.time() if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.state.model_name,
            "output": output,
            "background": False,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if generation is None else response_usage(generation),
            "user": body.user,
        }


def response_usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},  # nothing is billed
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **usage["completion_tokens_details"]},
        "total_tokens": usage["total_tokens"],
    }


async def responses(request: web.Request) -> web.StreamResponse:
    """A reply to a conversation, in the newer form."""
    state, arrival = request.app[STATE], time.monotonic()
    body = parse_body(await request.read(), ResponseBody)
    state.check_model(body.model)
    state.require_ready()
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    body.check()
    try:
        prompt = (await state.encode_chat(body.messages(), TemplateOptions())).token_ids
    except ApiError as error:
        if error.param == "messages":  # which are called otherwise here
            error.param, error.message = "input", error.message.replace("messages", "input", 1)
        raise
    params = fit_params(
        state,
        body.sampling_params(logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None),
        prompt,
        prompt_field="input",
        max_tokens=body.max_output_tokens,
        default_max_tokens=None,
        max_tokens_field="max_output_tokens",
        logprobs_field="top_logprobs",
    )
    generation = Generation(state, [prompt], [params], cache_salt=body.cache_salt, arrival=arrival)
    return await send_answer(request, ResponseAnswer(state, body), generation)
