"""/openapi.json: every path is in it, and what it says of bodies is what the types that read them say."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, call

from mambalign.engine.server.app import BODIES, make_app
from mambalign.engine.server.state import ServerState


@pytest.fixture(scope="module")
def url(fake_model: Path) -> Iterator[str]:
    with ServerProcess(fake_model, program="fake_core.py") as server:
        yield server.url


def test_every_path_is_told(url: str) -> None:
    document = call(f"{url}/openapi.json")[1]
    assert document["openapi"].startswith("3.1")
    told = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    routes = {(r.resource.canonical, r.method) for r in make_app(ServerState(None, "x")).router.routes()}
    assert told == {route for route in routes if route[1] != "HEAD"} and len(told) >= 11
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], path
            assert ("requestBody" in operation) == (path in BODIES) and (method == "post" or path not in BODIES)


@pytest.mark.parametrize("path", BODIES)
def test_every_field_is_told(url: str, path: str) -> None:
    document, body = call(f"{url}/openapi.json")[1], BODIES[path]
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    assert set(schema["properties"]) == {*body.__struct_fields__, *body.openai_fields}
    assert schema["additionalProperties"] is False
    for name, refused in body.openai_fields.items():
        if refused is not None:
            assert schema["properties"][name]["enum"] == [None, *refused.neutral]
            assert refused.instead in schema["properties"][name]["description"]
