"""What the endpoints that render a conversation have in common: usable tools, the reader of a reply, its tokens."""

from collections.abc import Callable

from mambalign.engine.server.assistant_text import AssistantText
from mambalign.engine.server.chat_template import RenderedChat
from mambalign.engine.server.chat_tools import Tool, ToolChoice, check_tools
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.generation import Generation
from mambalign.engine.server.reasoning import num_reasoning_tokens
from mambalign.engine.server.state import ServerState


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
