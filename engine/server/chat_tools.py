"""The tools of a chat body, and which of them the model may or must call."""

import re
from typing import Any, Literal

import msgspec

from mambalign.engine.server.errors import ApiError

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of an object; none: no parameters
    strict: bool | None = None  # the arguments must fit the schema


class Tool(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Without what was not given: some templates print all that is there."""
        given = {k: v for k, v in msgspec.to_builtins(self.function).items() if v is not None and k != "strict"}
        return {"type": "function", "function": {**given, "parameters": self.schema}}

    @property
    def schema(self) -> dict[str, Any]:
        return self.function.parameters or {"type": "object", "properties": {}}


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def check_tools(tools: list[Tool], choice: ToolChoice | None, function_path: str = "function.") -> None:
    """Raise ApiError 400 for names that are wrong, twice there, or chosen and not there.

    `function_path`: where the body has a function within its tool, for errors.
    """
    if len(tools) > MAX_TOOLS:
        raise ApiError(400, f"tools must hold at most {MAX_TOOLS} tools, got {len(tools)}", param="tools")
    for i, tool in enumerate(tools):
        check_schema(tool.schema, f"tools[{i}].{function_path}parameters")
    names = [tool.function.name for tool in tools]
    for i, name in enumerate(names):
        path = f"tools[{i}].{function_path}name"
        if not NAME.fullmatch(name):
            limit = "1 to 64 letters, digits, dots, dashes or underscores"
            raise ApiError(400, f"{path} must be {limit}, got {name!r}", param=path)
        if name in names[:i]:
            raise ApiError(400, f"{path}: {name!r} is the name of an earlier tool", param=path)
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        path = f"tool_choice.{function_path}name"
        raise ApiError(400, f"{path}: {choice.function.name!r} is not one of the tools", param=path)
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice is required, but there are no tools", param="tool_choice")


def check_schema(schema: dict[str, Any], path: str) -> None:
    """Raise ApiError 400 unless it is of an object whose parameters can be told apart."""
    for name, kind, wanted in (("properties", dict, "an object"), ("required", list, "a list of names")):
        if not isinstance(schema.get(name, kind()), kind):
            raise ApiError(400, f"{path}.{name} must be {wanted}", param=f"{path}.{name}")
    if schema.get("type", "object") != "object":
        raise ApiError(400, f'{path}.type must be "object"', param=f"{path}.type")
