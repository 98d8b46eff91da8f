"""Bodies made of the server's own OpenAPI document, right and wrong: 200 or a 4xx in OpenAI's shape, never a 500."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_core import EOS, SPECIAL
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from server_process import ServerProcess

from mambalign.engine.server.app import BODIES

NUM_BODIES = 5000
FEWEST_TAKEN = 500  # of them are answered: else the test would only meet refusals
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


REFS = "#/components/schemas/"


class Shapes:
    """Strategies of the values that a schema of the document allows, small ones."""

    def __init__(self, document: dict[str, Any]):
        self._schemas = document["components"]["schemas"]
        self._made: dict[str, st.SearchStrategy[Any]] = {}

    def named(self, name: str) -> st.SearchStrategy[Any]:
        if name not in self._made:
            self._made[name] = st.deferred(lambda: self.values(self._schemas[name]))
        return self._made[name]

    def values(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            return self.named(schema["$ref"].removeprefix(REFS))
        if "anyOf" in schema:
            return st.one_of(*map(self.values, schema["anyOf"]))
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "const" in schema:
            return st.just(schema["const"])
        match schema.get("type"):
            case "object":
                return self._objects(schema)
            case "array":
                return st.lists(self.values(schema["items"]) if schema.get("items") else VALUES, max_size=3)
            case "integer":
                return st.sampled_from([0, 1, 2, 3, 20, 21, 128, -1])
            case "number":
                return st.sampled_from([0, 1, 0.5, 1.5, -1.5, 2])
            case "string":
                return st.sampled_from(["ab", "a", "<slo", "é€", ""])
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
        assert "type" not in schema, schema
        return VALUES

    def _objects(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        if "properties" not in schema:
            keys, inner = st.sampled_from(["0", "5", "a", "type"]), schema.get("additionalProperties")
            return st.dictionaries(keys, self.values(inner) if inner else VALUES, max_size=2)
        shapes = {name: self.values(each) for name, each in schema["properties"].items()}
        required = schema.get("required", [])
        rest = sorted(set(shapes) - set(required))

        @st.composite
        def objects(draw: st.DrawFn) -> dict[str, Any]:
            names = [*required, *(draw(st.lists(st.sampled_from(rest), max_size=3, unique=True)) if rest else ())]
            return {name: draw(shapes[name]) for name in names}

        return objects()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in it with a key of its own."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


@st.composite
def requests(draw: st.DrawFn, shapes: Shapes) -> tuple[str, dict]:
    """A path and a body; one in two has a mistake somewhere, however deep."""
    path = draw(st.sampled_from(sorted(BODIES)))
    body = draw(shapes.named(BODIES[path].__name__))
    if draw(st.booleans()):
        body = json.loads(json.dumps(body))
        container, key = draw(st.sampled_from([*places(body), (body, "nonsense")]))
        container[key] = draw(VALUES)
    told_to_fail = set(range(len(SPECIAL))) - {EOS}  # token ids that make the fake core misbehave
    assume(told_to_fail.isdisjoint(each[key] for each, key in places(body.get("prompt")) if type(each[key]) is int))
    return path, body


@pytest.fixture(scope="module")
def connection(fake_model: Path) -> Iterator[http.client.HTTPConnection]:
    with ServerProcess(fake_model, "--spec-tokens", "2", program="fake_core.py") as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
        yield connection
        assert server.process.poll() is None
        connection.close()


def ask(connection: http.client.HTTPConnection, path: str, body: Any = None) -> tuple[int, bytes]:
    """GET, or POST of a value or of bytes as they are."""
    if body is None:
        connection.request("GET", path)
    else:
        data = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read()


def test_never_a_500(connection: http.client.HTTPConnection) -> None:
    shapes = Shapes(json.loads(ask(connection, "/openapi.json")[1]))
    statuses: list[int] = []

    @settings(max_examples=NUM_BODIES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True,
              database=None)  # fmt: skip
    @given(request=requests(shapes))
    def check(request: tuple[str, dict]) -> None:
        path, body = request
        status, text = ask(connection, path, body)
        statuses.append(status)
        assert status in (200, 400, 404), (status, text)
        if status != 200:
            error = json.loads(text)["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"], error
            assert error["param"] or error["message"].startswith("the body is not valid JSON"), error
        elif body.get("stream"):
            events = [line for line in text.decode().splitlines() if line.startswith("data: ")]
            assert events and all("error" not in line[:12] for line in events)

    check()
    assert len(statuses) >= NUM_BODIES and statuses.count(200) >= FEWEST_TAKEN


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b'{"prompt": NaN}', b"\xff", b'"x"', b"[" * 100_000])
def test_what_is_no_object(connection: http.client.HTTPConnection, data: bytes) -> None:
    for path in BODIES:
        status, text = ask(connection, path, data)
        assert status == 400 and json.loads(text)["error"]["message"]
