"""A wrong word in a body is answered with the right ones."""

import json
from typing import Any

import pytest

from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.protocol import Body, ChatBody, CompletionBody, parse_body
from mambalign.engine.server.response_body import ResponseBody

ROLES = 'one of "system", "developer", "user", "assistant", "tool"'
CHOICES = 'one of "auto", "none", "required"'
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ChatBody, {"messages": [USER, {"role": "bob"}]}, f"messages[1].role must be {ROLES}, got 'bob'"),
        (ChatBody, {"messages": [USER], "tool_choice": "any"}, f"tool_choice must be {CHOICES}, got 'any'"),
        (
            ChatBody,
            {"messages": [USER], "tool_choice": {"type": "custom"}},
            "tool_choice.type must be \"function\", got 'custom'",
        ),
        (
            ChatBody,
            {"messages": [USER], "response_format": {"type": "yaml"}},
            'response_format.type must be one of "text", "json_object", "json_schema", got \'yaml\'',
        ),
        (
            ResponseBody,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            'input[0].content[0].type must be one of "input_text", "output_text", got \'input_image\'',
        ),
        (ResponseBody, {"input": "x", "truncation": "auto"}, "truncation must be \"disabled\", got 'auto'"),
        (
            CompletionBody,
            {"prompt": "x", "structured_outputs": {"json_object": False}},
            "structured_outputs.json_object must be true, got False",
        ),
        (CompletionBody, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias: a key: expected `int`, got `str`"),
        (CompletionBody, {"prompt": "x", "logit_bias": {"1": "a"}}, "logit_bias: a value: expected `float`, got `str`"),
    ],
)
def test_the_message_says_what_is_allowed(kind: type[Body], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(json.dumps(fields).encode(), kind)
    assert refused.value.message == message
    assert refused.value.status == 400 and message.startswith(str(refused.value.param))
