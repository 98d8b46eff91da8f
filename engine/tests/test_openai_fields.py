"""The table of OpenAI's fields against the installed openai client's own types, and against the server."""

import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from server_process import ServerProcess, call

from mambalign.engine.server.openai_fields import CHAT, COMPLETION, RESPONSE, FieldTable, Refused
from mambalign.engine.server.protocol import Body, ChatBody, CompletionBody, StreamOptions
from mambalign.engine.server.response_body import ResponseBody

REQUESTS = {
    "/v1/completions": (
        completion_create_params.CompletionCreateParamsStreaming, CompletionBody, COMPLETION, {"prompt": "x"}
    ),
    "/v1/chat/completions": (
        chat_create_params.CompletionCreateParamsStreaming,
        ChatBody,
        CHAT,
        {"messages": [{"role": "user", "content": "x"}]},
    ),
    "/v1/responses": (response_create_params.ResponseCreateParamsStreaming, ResponseBody, RESPONSE, {"input": "x"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def url(fake_model: Path) -> Iterator[str]:
    with ServerProcess(fake_model, program="fake_core.py") as server:
        yield server.url


@pytest.mark.parametrize("path", REQUESTS)
def test_every_field_of_the_client_is_in_the_table(path: str) -> None:
    params, body, table, _ = REQUESTS[path]
    assert typing.get_type_hints(params).keys() == table.keys()
    check_bodies(body, table)


def check_bodies(body: type[Body], table: FieldTable) -> None:
    honoured = {name for name, refused in table.items() if refused is None}
    assert honoured <= set(body.__struct_fields__)
    assert not (table.keys() - honoured) & set(body.__struct_fields__)


def test_stream_options() -> None:
    assert set(ChatCompletionStreamOptionsParam.__annotations__) == set(StreamOptions.__struct_fields__)


def refused_fields() -> Iterator[tuple[str, str, Refused]]:
    for path, (_, _, table, _) in REQUESTS.items():
        yield from ((path, name, refused) for name, refused in table.items() if refused is not None)


@pytest.mark.parametrize(("path", "name", "refused"), [*refused_fields()])
def test_a_refused_field_says_what_to_do(url: str, path: str, name: str, refused: Refused) -> None:
    body = REQUESTS[path][3]
    for value in ({"some": "thing"}, ["x"], "x", 7):
        status, answer = call(url + path, body | {name: value})
        assert status == 400, answer
        assert answer["error"]["param"] == name and answer["error"]["code"] == "unsupported_parameter"
        assert answer["error"]["message"] == f"{name} is not supported by this server: {refused.instead}"
    for value in (None, *refused.neutral):
        assert call(url + path, body | {name: value})[0] == 200
