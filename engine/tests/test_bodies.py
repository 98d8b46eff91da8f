"""Bodies that no person would write: whatever comes, the answer is 200 or a 4xx in OpenAI's shape, never a 500."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_process import ServerProcess

from mambalign.engine.server.openai_fields import CHAT, COMPLETION, RESPONSE
from mambalign.engine.server.protocol import ChatBody, CompletionBody
from mambalign.engine.server.response_body import ResponseBody

ENDPOINTS = {
    "/v1/completions": (CompletionBody, COMPLETION, {"prompt": "ab"}),
    "/v1/chat/completions": (ChatBody, CHAT, {"messages": [{"role": "user", "content": "ab"}]}),
    "/v1/responses": (ResponseBody, RESPONSE, {"input": "ab"}),
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 2**70, 0.0, -0.0, 0.5, 1e308, -1.5, 5e-324]),
    st.text(max_size=6),
    st.sampled_from(["", "auto", "none", "text", "user", "disabled", "\ud800", "\x00", "a" * 1500, "naïve €"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "0", "5", "-1", "x", "format"]), inner, max_size=3
        ),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def connection(fake_model: Path) -> Iterator[http.client.HTTPConnection]:
    with ServerProcess(fake_model, "--spec-tokens", "2", program="fake_core.py") as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
        yield connection
        assert server.process.poll() is None
        connection.close()


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict]:
    path = draw(st.sampled_from(sorted(ENDPOINTS)))
    body, table, valid = ENDPOINTS[path]
    names = sorted({*body.__struct_fields__, *table, "nonsense"})
    changes = draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=4))
    if draw(st.booleans()):  # values that are right by themselves: mistakes lie in how they go together
        ints = st.sampled_from([0, 1, 2, 3, 20, 21, 128])
        for name in draw(st.lists(st.sampled_from(names), max_size=5)):
            changes[name] = draw(st.one_of(ints, st.booleans()))
    return path, valid | changes


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(request=requests())
def test_never_a_500(connection: http.client.HTTPConnection, request: tuple[str, dict]) -> None:
    path, body = request
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    status, text = response.status, response.read()
    assert status in (200, 400, 404), (status, text)
    if status != 200:
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
    elif body.get("stream"):
        events = [line for line in text.decode().splitlines() if line.startswith("data: ")]
        assert events and all("error" not in line[:12] for line in events)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b'{"prompt": NaN}', b"\xff", b'"x"', b"[" * 100_000])
def test_what_is_no_object(connection: http.client.HTTPConnection, data: bytes) -> None:
    for path in ENDPOINTS:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 400 and json.loads(response.read())["error"]["message"]
