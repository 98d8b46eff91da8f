"""What the endpoints that render a conversation have in common: usable tools, the reader of a reply, its tokens."""

from collections.abc import Callable
from typing import Any

from mambalign.engine.server.assistant_text import AssistantText
from mambalign.engine.server.chat_template import RenderedChat
from mambalign.engine.server.chat_tools import Tool, ToolChoice, check_tools
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.generation import Generation
from mambalign.engine.server.protocol import ChatBody
from mambalign.engine.server.reasoning import num_reasoning_tokens
from mambalign.engine.server.response_body import ResponseBody
from mambalign.engine.server.state import ServerState
from mambalign.engine.server.structured import structured_outputs
from mambalign.worker.sampling_params import SamplingParams, StructuredOutputs


def usable_tools(
    state: ServerState, tools: list[Tool], choice: ToolChoice | None, function_path: str = "function."
) -> list[Tool]:
    """The tools that the model may call; with `choice` "none" it is not told of any. Raises ApiError 400.

    `function_path`: where the body has a function within its tool, for errors.
    """
    check_tools(tools, choice, function_path)
    if choice == "none":
        return []
    if tools and state.chat_template.tool_parser is None and state.chat_template:
        raise ApiError(
            400,
            "tools are not supported: nothing is known of how this model writes calls; leave them out, or start the "
            "server with --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )
    return tools


def reply_params(
    state: ServerState,
    body: ChatBody | ResponseBody,
    chat: RenderedChat,
    tools: list[Tool],
    choice: ToolChoice | None,
    *,
    format: StructuredOutputs | None,
    wants_logprobs: bool,
) -> SamplingParams:
    """The body's parameters, with the grammar that the reply must follow. Raises ApiError 400."""
    changes: dict[str, Any] = {"logprobs": (body.top_logprobs or 0) if wants_logprobs else None}
    changes["structured_outputs"] = structured_outputs(
        state.chat_template,
        chat,
        format=format,
        fields=body.structured_outputs,
        tools=tools,
        tool_choice=choice,
        parallel=body.parallel_tool_calls is not False,
    )
    if not state.chat_template.shows_as_text(tools=bool(tools)):
        changes["skip_special_tokens"] = False
    return body.sampling_params(**changes)


async def check_grammar(
    state: ServerState, params: SamplingParams, tools: list[Tool], function_path: str = "function."
) -> None:
    """Raise ApiError for a grammar that the engine could not compile; of several tools it says whose schema is wrong.

    `function_path`: where the body has a function within its tool.
    """
    try:
        await state.check_grammar(params.structured_outputs)
    except ApiError as error:
        if error.param == "tools" and error.code is None:
            for i, tool in enumerate(tools):
                path = f"tools[{i}].{function_path}parameters"
                await state.check_grammar(StructuredOutputs(json=tool.schema, field=path))
        raise


def reader_maker(state: ServerState, tools: list[Tool], chat: RenderedChat) -> Callable[[], AssistantText]:
    parser = state.chat_template.tool_parser if tools else None
    parameters = {tool.function.name: tool.schema for tool in tools}
    return lambda: AssistantText(parser, parameters, chat.reasoning_start)


def reasoning_tokens(state: ServerState, chat: RenderedChat, generation: Generation) -> int:
    """How many of the tokens that came are reasoning or its tags."""
    if chat.reasoning_start in (None, "behind"):
        return 0

    def decode(token_ids: list[int]) -> str:
        return state.tokenizer.decode(token_ids, skip_special_tokens=False)

    return sum(num_reasoning_tokens(decode, choice.token_ids, chat.reasoning_start) for choice in generation.choices)
