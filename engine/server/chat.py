"""/v1/chat/completions: read the body, render the conversation, run it, shape the answer."""

import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from mambalign.engine.messages import EngineOutput
from mambalign.engine.server.answer import Answer, check_stream_options, send_answer
from mambalign.engine.server.assistant_delta import AssistantDelta, CallDelta
from mambalign.engine.server.assistant_text import AssistantText
from mambalign.engine.server.chat_messages import messages_for_template
from mambalign.engine.server.chat_template import RenderedChat
from mambalign.engine.server.chat_tools import NamedTool
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.generation import Choice, Generation, fit_params
from mambalign.engine.server.protocol import ChatBody, parse_body, template_options
from mambalign.engine.server.reply import check_grammar, reader_maker, reasoning_tokens, reply_params, usable_tools
from mambalign.engine.server.state import STATE, ServerState
from mambalign.engine.server.structured import of_response_format
from mambalign.engine.server.token_text import chat_logprobs


class ChatAnswer(Answer):
    """`make_reader` makes what reads one choice's text; `chat` is the conversation that the choices go on from."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self, state: ServerState, body: ChatBody, chat: RenderedChat, make_reader: Callable[[], AssistantText]
    ):
        super().__init__(state, body, "chatcmpl")
        self._chat = chat
        self._make_reader = make_reader
        self._readers: dict[int, AssistantText] = {}  # of choices whose first chunk was sent

    def _choice(
        self, choice: Choice, part: dict[str, Any], ids: list[int], logprobs: list | None, num_calls: int
    ) -> dict[str, Any]:
        content = None
        if logprobs is not None and self.body.logprobs:
            content = chat_logprobs(self.state.token_text, ids, logprobs, self.body.top_logprobs or 0)
        reason = choice.finish_reason
        if reason == "stop" and num_calls and not isinstance(self.body.tool_choice, NamedTool):
            reason = "tool_calls"  # of a call that the client asked for by name OpenAI says "stop"
        return {
            "index": choice.index,
            **part,
            "logprobs": content,
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
            **self.token_ids(ids),
        }

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        reader = self._make_reader()
        said = reader.read(choice.text)
        said.add(reader.finish())
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["content"] = said.content or None
            message["tool_calls"] = [new_call(call) for call in said.calls]
        part = {"message": message} | self.of_prompt(choice)
        return self._choice(choice, part, choice.token_ids, choice.logprobs, reader.num_calls)

    def chunk_choices(self, choice: Choice, output: EngineOutput) -> list[dict[str, Any]]:
        """The first chunk of a choice says the role and nothing else."""
        chunks = []
        reader = self._readers.get(choice.index)
        if reader is None:
            reader = self._readers[choice.index] = self._make_reader()
            first = {"delta": {"role": "assistant", "content": ""}}
            first_chunk = self._choice(choice, first, [], None, 0) | {"finish_reason": None, "stop_reason": None}
            chunks.append(first_chunk | self.of_prompt(choice))
        said = reader.read(output.new_text)
        if output.finish_reason:
            said.add(reader.finish())
        if not said.is_empty or self.has_news(msgspec.structs.replace(output, new_text="")):
            delta = {"delta": as_delta(said)}
            chunks.append(
                self._choice(choice, delta, output.new_token_ids, output.new_logprobs, reader.num_calls)
            )  # fmt: skip
        return chunks

    def usage(self, generation: Generation) -> dict[str, Any]:
        usage = super().usage(generation)
        usage["completion_tokens_details"]["reasoning_tokens"] = reasoning_tokens(self.state, self._chat, generation)
        return usage


def as_delta(said: AssistantDelta) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if said.reasoning:
        delta["reasoning_content"] = said.reasoning
    if said.content:
        delta["content"] = said.content
    if said.calls:
        delta["tool_calls"] = [
            {"index": call.index}
            | (new_call(call) if call.name is not None else {"function": {"arguments": call.arguments}})
            for call in said.calls
        ]
    return delta


def new_call(call: CallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Replies to a conversation."""
    state, arrival = request.app[STATE], time.monotonic()
    body = parse_body(await request.read(), ChatBody)
    state.check_model(body.model)
    state.require_ready()
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens are one field: give one", param="max_tokens")
    tools = usable_tools(state, body.tools or [], body.tool_choice)
    chat = await state.encode_chat(messages_for_template(body.messages), template_options(body, tools))
    params = reply_params(
        state,
        body,
        chat,
        tools,
        body.tool_choice,
        format=of_response_format(body.response_format),
        wants_logprobs=bool(body.logprobs),
    )
    params = fit_params(
        state,
        params,
        chat.token_ids,
        prompt_field="messages",
        max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        default_max_tokens=None,
        max_tokens_field="max_completion_tokens" if body.max_tokens is None else "max_tokens",
        logprobs_field="top_logprobs",
    )
    await check_grammar(state, params, tools)
    generation = Generation(state, [chat.token_ids], [params], cache_salt=body.cache_salt, arrival=arrival)
    return await send_answer(request, ChatAnswer(state, body, chat, reader_maker(state, tools, chat)), generation)
