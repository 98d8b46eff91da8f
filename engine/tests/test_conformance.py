"""Field by field and value by value: what is taken, and what is refused by name, raw and through the openai client."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import openai
import pytest
from server_process import ServerProcess, call

from mambalign.engine.server.protocol import Body, ChatBody, CompletionBody
from mambalign.engine.server.response_body import INCLUDE_LOGPROBS, ResponseBody


class Row(NamedTuple):
    """Values of one field, each sent alone beside the endpoint's valid body and `beside`."""

    taken: list[Any]
    refused: list[Any]
    beside: Mapping[str, Any] = MappingProxyType({})


HUGE = 2**70
NO_TEXT = [7, [], {}, True]
NO_FLAG = [0, 1, "true", []]
NO_NUMBER = ["1", [], {}, True]
NO_INT = ["1", 1.5, [], {}, True, HUGE]
NO_OBJECT = [7, "x", [], True]

TEXT, FLAG = Row(["", "me", "é€"], NO_TEXT), Row([True, False], NO_FLAG)
PENALTY = Row([-2, 0, 0.5, 2], [-2.1, 2.1, *NO_NUMBER])
USER_TURN = {"role": "user", "content": "ab"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
CALL_OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "x"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]}
RESPONSE_FORMAT = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}

SAMPLING = {
    "model": Row(["tiny"], NO_TEXT),
    "min_tokens": Row([0, 1, 3], [-1, 999, *NO_INT]),
    "temperature": Row([0, 1e-9, 0.5, 2], [-0.1, 2.1, *NO_NUMBER]),
    "top_p": Row([1e-6, 0.5, 1], [0, -0.1, 1.1, *NO_NUMBER]),
    "top_k": Row([-1, 0, 1, 50, 2**31 - 1], [-2, 2**31, *NO_INT]),
    "min_p": Row([0, 0.5, 1], [-0.1, 1.1, *NO_NUMBER]),
    "seed": Row([0, -1, 2**63 - 1, -(2**63)], [2**63, *NO_INT]),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": Row([0.1, 1, 3], [0, -1, *NO_NUMBER]),
    "logit_bias": Row([{}, {"5": 100, "6": -100}], [{"5": 101}, {"-1": 1}, {"999": 1}, {"a": 1}, {"5": "1"}, 7, []]),
    "stop": Row(["zz", ["zz", "yy"], [], ["z"] * 16], ["", [""], ["z"] * 17, ["z", 7], "z" * 1025, 7, {}, True]),
    "stop_token_ids": Row([[], [5]], [[-1], [999], ["5"], 5, "5", {}]),
    "ignore_eos": FLAG,
    "skip_special_tokens": FLAG,
    "structured_outputs": Row([], [{}, {"json": 5}, {"other": "x"}, {"regex": "a", "choice": ["a"]}, *NO_OBJECT]),
    "stream": Row([False], NO_FLAG),
    "stream_options": Row([], [{"include_usage": True}, {"other": True}, *NO_OBJECT]),
    "cache_salt": TEXT,
    "user": TEXT,
}
SEVERAL = {
    "n": Row([1, 3, 128], [0, -1, 129, *NO_INT]),
    "prompt_logprobs": Row([0, 20], [-1, 21, *NO_INT]),
    "return_token_ids": FLAG,
}
ROWS: dict[str, dict[str, Row]] = {
    "/v1/completions": SAMPLING | SEVERAL | {
        "prompt": Row(["x", [70, 71], ["a", "b"], [[70], [71]]], ["", [], [[]], ["a", [1]], [999], [-1], 7, {}, None]),
        "max_tokens": Row([1, 200], [0, -1, 999, *NO_INT]),
        "logprobs": Row([0, 20], [-1, 21, *NO_INT]),
        "best_of": Row([1, 3], [0, -1, 129, *NO_INT]),
        "echo": FLAG,
    },
    "/v1/chat/completions": SAMPLING | SEVERAL | {
        "messages": Row([[USER_TURN], [USER_TURN, USER_TURN | {"name": "b"}]], [[], [7], "x", {}, None]),
        "max_tokens": Row([1, 200], [0, -1, 999, *NO_INT]),
        "max_completion_tokens": Row([1, 200], [0, -1, 999, *NO_INT], {"max_tokens": None}),
        "logprobs": Row([True, False], NO_FLAG),
        "top_logprobs": Row([0, 20], [-1, 21, *NO_INT], {"logprobs": True}),
        "tools": Row([[]], [[{"type": "function", "function": {"name": "f"}}], [7], *NO_OBJECT[:2], {}]),
        "tool_choice": Row(["none", "auto"], ["required", "any", 7, {"type": "x"}]),
        "parallel_tool_calls": FLAG,
        "response_format": Row([{"type": "text"}], [{"type": "x"}, {}, {"type": "json_schema"}, *NO_OBJECT]),
        "add_generation_prompt": FLAG,
        "continue_final_message": Row([False], [True, *NO_FLAG]),
        "reasoning_effort": Row(["none"], ["high", "x", *NO_TEXT]),
        "chat_template_kwargs": Row([{}], [{"other": 1}, {"messages": []}, *NO_OBJECT]),
        "prompt_cache_key": TEXT,
        "safety_identifier": TEXT,
    },
    "/v1/responses": SAMPLING | {
        "input": Row(
            ["x", [USER_TURN], [USER_TURN | {"type": "message"}], [CALL, CALL_OUTPUT], [REASONING, USER_TURN]],
            [[], [7], [{"role": "x"}], [CALL_OUTPUT], [CALL | {"arguments": "["}], [{"type": "x"}], 7, {}, None],
        ),
        "instructions": TEXT,
        "max_output_tokens": Row([1, 200], [0, -1, 999, *NO_INT]),
        "metadata": Row([{}, {"a": "b"}], [{"a": 1}, {"k" * 65: ""}, {"k": "v" * 513}, *NO_OBJECT]),
        "include": Row([[], [INCLUDE_LOGPROBS]], [["x"], [7], 7, "x", {}]),
        "text": Row(
            [{}, *({"format": f} for f in ({"type": "text"}, {"type": "json_object"}, RESPONSE_FORMAT))],
            [{"format": {"type": "x"}}, {"format": {"type": "json_schema"}}, {"verbosity": "low"}, *NO_OBJECT],
        ),
        "reasoning": Row([{}, {"effort": "none"}], [{"effort": "high"}, {"effort": 1}, {"summary": "x"}, *NO_OBJECT]),
        "tools": Row([[]], [[{"type": "function", "name": "f"}], [{"type": "mcp"}], [7], *NO_OBJECT[:2], {}]),
        "tool_choice": Row(["none", "auto"], ["required", "any", 7, {"type": "x"}, {"type": "function", "name": "f"}]),
        "parallel_tool_calls": FLAG,
        "truncation": Row(["disabled"], ["auto", *NO_TEXT]),
        "top_logprobs": Row([0, 20], [-1, 21, *NO_INT], {"include": [INCLUDE_LOGPROBS]}),
        "prompt_cache_key": TEXT,
        "safety_identifier": TEXT,
    },
}  # fmt: skip
ENDPOINTS: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, {"prompt": "ab", "max_tokens": 4}),
    "/v1/chat/completions": (ChatBody, {"messages": [USER_TURN], "max_tokens": 4}),
    "/v1/responses": (ResponseBody, {"input": "ab", "max_output_tokens": 4}),
}
FIELDS = [(path, name) for path, rows in ROWS.items() for name in rows]


@pytest.fixture(scope="module")
def url(fake_model: Path) -> Iterator[str]:
    with ServerProcess(fake_model, "--spec-tokens", "3", program="fake_core.py") as server:
        yield server.url


@pytest.mark.parametrize("path", ROWS)
def test_every_field_has_a_row(path: str) -> None:
    assert ROWS[path].keys() == set(ENDPOINTS[path][0].__struct_fields__)


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_field(url: str, path: str, name: str) -> None:
    row, (_, valid) = ROWS[path][name], ENDPOINTS[path]
    body = valid | row.beside
    for value in [*row.taken, *([None] if None not in row.refused else [])]:
        status, answer = call(url + path, body | {name: value})
        assert status == 200, (value, answer)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for value in row.refused:
        status, answer = call(url + path, body | {name: value})
        error = answer["error"]
        assert status == 400 and error["type"] == "invalid_request_error", (value, answer)
        assert says(error["param"], name) and error["param"].split("[")[0] in error["message"], (value, answer)
        with pytest.raises(openai.BadRequestError) as refusal:
            client.post(path.removeprefix("/v1"), body=body | {name: value}, cast_to=object)
        assert refusal.value.param == error["param"]


def says(param: str | None, name: str) -> bool:
    """Whether it names the field, or something within it."""
    return param == name or (param or "").startswith((f"{name}.", f"{name}["))


@pytest.mark.parametrize("path", ROWS)
def test_a_field_that_nobody_knows(url: str, path: str) -> None:
    for value in (None, 1, "x", {}):
        status, answer = call(url + path, ENDPOINTS[path][1] | {"nonsense": value})
        assert (status, answer["error"]["param"]) == (400, "nonsense")
        assert answer["error"]["code"] == "unknown_parameter"
