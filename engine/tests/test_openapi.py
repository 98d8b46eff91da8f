"""The OpenAPI document against the routes; and bodies made of it, right and wrong ones: a 200 or a 4xx, never a 500."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_core import SPECIAL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_process import ServerProcess, call

from mambalign.engine.server.app import ROUTES
from mambalign.engine.server.openapi import openapi_document
from mambalign.engine.server.response_body import INCLUDE_LOGPROBS

DOCUMENT = json.loads(json.dumps(openapi_document(ROUTES)))
NUM_BODIES = 5000
POSTS = [path for path, ways in DOCUMENT["paths"].items() if "requestBody" in ways.get("post", {})]
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["tiny", "ab", "", "\x00", "a" * 1500, "naïve €", "<tool_call>", "[", INCLUDE_LOGPROBS]),
)
INTS = st.one_of(st.integers(0, 5), st.integers(-3, 30), st.sampled_from([128, 129, 2**31, 2**63, -(2**63) - 1]))
NUMBERS = st.one_of(st.floats(0, 1), st.sampled_from([-2.5, 2, 2.1, 1e308, 5e-324, -0.0]))
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), INTS, NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
SCALARS = {
    "null": st.none(), "boolean": st.booleans(), "integer": INTS, "number": NUMBERS, "string": TEXTS,
}  # fmt: skip
made: dict[str, st.SearchStrategy[Any]] = {}  # by reference


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema of the document lets through; its words are those that msgspec writes."""
    if "$ref" in schema:
        ref = schema["$ref"]
        return made.setdefault(ref, st.deferred(lambda: values(resolve(ref))))
    if "anyOf" in schema:
        return st.one_of(*map(values, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case None:
            return ANYTHING
        case "array":
            return st.lists(values(schema.get("items", {})), max_size=3)
        case "object":
            return objects(schema)
        case kind:
            return SCALARS[kind]


def objects(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    if "properties" not in schema:
        keys = st.one_of(st.text(max_size=3), st.integers(0, 300).map(str))
        return st.dictionaries(keys, values(schema.get("additionalProperties") or {}), max_size=3)
    required = schema.get("required", [])
    fields = {name: values(each) for name, each in schema["properties"].items()}
    some = st.lists(st.sampled_from(sorted(fields)), max_size=5) if fields else st.just([])
    return some.flatmap(lambda names: st.fixed_dictionaries({n: fields[n] for n in {*required, *names}}))


def resolve(ref: str) -> dict[str, Any]:
    return DOCUMENT["components"]["schemas"][ref.removeprefix("#/components/schemas/")]


@st.composite
def mutated(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """A body with something wrong, at any depth: a value of any kind in a value's place, one too much or too few."""
    places: list[tuple[Any, Any]] = []

    def walk(container: Any) -> None:
        for key in range(len(container)) if isinstance(container, list) else list(container):
            places.append((container, key))
            if isinstance(container[key], list | dict):
                walk(container[key])

    body = json.loads(json.dumps(body))
    walk(body)
    for container, key in draw(st.lists(st.sampled_from(places), min_size=1, max_size=2)) if places else []:
        if isinstance(container, list):
            if key < len(container):
                container[key] = draw(ANYTHING)
        elif how := draw(st.sampled_from(["value", "more", "less"])):
            if how == "less":
                container.pop(key, None)
            else:
                container[key if how == "value" else draw(st.text(max_size=4))] = draw(ANYTHING)
    return body


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(POSTS))
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = draw(values(schema))
    if body.get("model") is not None and draw(st.integers(0, 3)):
        body["model"] = "tiny"
    body = draw(mutated(body)) if draw(st.booleans()) else body
    if "prompt" in body:
        body["prompt"] = without_commands(body["prompt"])
    return path, body


def without_commands(prompt: Any) -> Any:
    """A prompt without the token ids that make the fake core misbehave."""
    if isinstance(prompt, list):
        return [without_commands(each) for each in prompt]
    return 100 if isinstance(prompt, int) and 0 <= prompt < len(SPECIAL) else prompt


@pytest.fixture(scope="module")
def server(fake_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(fake_model, "--spec-tokens", "3", program="fake_core.py") as server:
        yield server


@pytest.fixture(scope="module")
def connection(server: ServerProcess) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    yield connection
    connection.close()


def test_the_document_covers_every_route(server: ServerProcess) -> None:
    assert call(f"{server.url}/openapi.json") == (200, DOCUMENT)
    served = {(route.method.lower(), route.path.replace(":.+", "")) for route in ROUTES}
    assert served == {(method, path) for path, ways in DOCUMENT["paths"].items() for method in ways}
    for ways in DOCUMENT["paths"].values():
        for way in ways.values():
            assert way["summary"] and way["responses"].keys() == {"200", "default"}
    for ref in {part.partition('"')[0] for part in json.dumps(DOCUMENT).split('"$ref": "')[1:]}:
        assert resolve(ref)


def test_a_refused_field_is_in_the_document_with_what_to_do() -> None:
    fields = resolve("#/components/schemas/CompletionBody")["properties"]
    assert fields["suffix"]["enum"] == [None, ""] and "put both sides into prompt" in fields["suffix"]["description"]
    assert resolve("#/components/schemas/ResponseBody")["required"] == ["input"]


def test_never_a_500(server: ServerProcess, connection: http.client.HTTPConnection) -> None:
    counts: dict[int, int] = {}

    @settings(
        max_examples=NUM_BODIES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(request=requests())
    def check(request: tuple[str, dict[str, Any]]) -> None:
        path, body = request
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        status, text = response.status, response.read()
        counts[status] = counts.get(status, 0) + 1
        assert status in (200, 400, 404), (status, text)
        if status != 200:
            error = json.loads(text)["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"]
            assert error["type"] == "invalid_request_error" and error["param"] is not None, error
            field = error["param"].partition("[")[0].partition(".")[0]
            assert field in error["message"], error
        elif body.get("stream"):
            events = [line for line in text.decode().splitlines() if line.startswith("data: ")]
            assert events and not any(line.startswith('data: {"error"') for line in events)

    check()
    assert sum(counts.values()) >= NUM_BODIES and counts[200] > NUM_BODIES / 20, counts
    assert server.process.poll() is None and server.metrics()["num_requests_running"] == 0
