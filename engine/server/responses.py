"""/v1/responses: a reply's reasoning, text and calls as items, whole or as OpenAI's typed events. Nothing is stored."""

import time
from typing import Any

import msgspec
from aiohttp import web

from mambalign.engine.messages import EngineOutput, TokenLogprobs
from mambalign.engine.server.answer import Answer, check_stream_options, event, send_answer
from mambalign.engine.server.assistant_text import AssistantText
from mambalign.engine.server.chat_template import RenderedChat
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.generation import Choice, Generation, fit_params
from mambalign.engine.server.protocol import parse_body
from mambalign.engine.server.reply import check_grammar, reader_maker, reasoning_tokens, reply_params, usable_tools
from mambalign.engine.server.response_body import ResponseBody
from mambalign.engine.server.response_items import Event, OutputItems, join_deltas
from mambalign.engine.server.state import STATE, ServerState
from mambalign.engine.server.token_text import chat_logprobs

FIELDS_OF_CHATS = {"messages": "input", "reasoning_effort": "reasoning.effort"}  # which are called otherwise here


class ResponseAnswer(Answer):
    """The response object and its stream: created, in progress, each item as it is written, completed."""

    def __init__(self, state: ServerState, body: ResponseBody, chat: RenderedChat, reader: AssistantText):
        super().__init__(state, body, "resp")
        self._chat = chat
        self._items = OutputItems(reader)
        self._num_events = 0

    def whole(self, generation: Generation) -> dict[str, Any]:
        (choice,) = generation.choices
        self._items.read(choice.text, self._logprobs(choice.token_ids, choice.logprobs))
        return self._ended(generation)[1]

    def begin(self) -> list[bytes]:
        response = self._response("in_progress")
        return self._encode([{"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress")])

    def news(self, choice: Choice, output: EngineOutput) -> list[bytes]:
        logprobs = self._logprobs(output.new_token_ids, output.new_logprobs)
        return self._encode(join_deltas(self._items.read(output.new_text, logprobs)))

    def end(self, generation: Generation) -> list[bytes]:
        events, response = self._ended(generation)
        return self._encode([*events, {"type": f"response.{response['status']}", "response": response}])

    def failed(self, error: ApiError, generation: Generation) -> list[bytes]:
        self._items.finish("incomplete")
        response = self._response("failed", generation)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._encode([{"type": "response.failed", "response": response}])

    def _ended(self, generation: Generation) -> tuple[list[Event], dict[str, Any]]:
        """The last events of the items, and the response as it then is."""
        status = "incomplete" if generation.choices[0].finish_reason == "length" else "completed"
        return join_deltas(self._items.finish(status)), self._response(status, generation)

    def _encode(self, events: list[Event]) -> list[bytes]:
        encoded = []
        for each in events:
            encoded.append(event({"sequence_number": self._num_events, **each}, each["type"]))
            self._num_events += 1
        return encoded

    def _logprobs(self, ids: list[int], logprobs: list[TokenLogprobs] | None) -> list[dict[str, Any]]:
        if not self.body.wants_logprobs or not logprobs:
            return []
        return chat_logprobs(self.state.token_text, ids, logprobs, self.body.top_logprobs or 0)["content"]

    def _response(self, status: str, generation: Generation | None = None) -> dict[str, Any]:
        """The response object: what was asked, at the values that hold, and what came."""
        body, is_cut = self.body, status == "incomplete"
        text_format = (body.text and body.text.format) or {"type": "text"}
        choice = body.tool_choice or "auto"
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
            "output": self._items.whole(),
            "background": False,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": msgspec.to_builtins(text_format)},
            "tool_choice": msgspec.to_builtins(choice),
            "tools": [msgspec.to_builtins(tool) | {"strict": tool.strict is not False} for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if generation is None else self.usage(generation),
            "user": body.user,
        }

    def usage(self, generation: Generation) -> dict[str, Any]:
        usage = generation.usage()
        reasoning = {"reasoning_tokens": reasoning_tokens(self.state, self._chat, generation)}
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},  # nothing is billed
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": reasoning | usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


async def responses(request: web.Request) -> web.StreamResponse:
    """A reply to a conversation, in the newer form."""
    state, arrival = request.app[STATE], time.monotonic()
    body = parse_body(await request.read(), ResponseBody)
    state.check_model(body.model)
    state.require_ready()
    check_stream_options(body)
    body.check()
    tools = usable_tools(state, body.chat_tools, body.chat_tool_choice, function_path="")
    try:
        chat = await state.encode_chat(body.messages(), body.template_options(tools))
    except ApiError as error:
        if name := FIELDS_OF_CHATS.get(error.param):
            error.message = error.message.replace(error.param, name, 1)
            error.param = name
        raise
    reader = reader_maker(state, tools, chat)()
    if body.wants_logprobs and not reader.is_plain:
        message = "include: log-probabilities are given where the reply is text alone, without tools or reasoning"
        raise ApiError(400, message, param="include")
    params = reply_params(
        state, body, chat, tools, body.chat_tool_choice, format=body.format, wants_logprobs=body.wants_logprobs
    )
    params = fit_params(
        state,
        params,
        chat.token_ids,
        prompt_field="input",
        max_tokens=body.max_output_tokens,
        default_max_tokens=None,
        max_tokens_field="max_output_tokens",
        logprobs_field="top_logprobs",
    )
    await check_grammar(state, params, tools, function_path="")
    generation = Generation(state, [chat.token_ids], [params], cache_salt=body.cache_salt, arrival=arrival)
    return await send_answer(request, ResponseAnswer(state, body, chat, reader), generation)
