"""`/openapi.json`: an OpenAPI 3.1 document, made of the routes and of the types that bodies are checked with."""

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from mambalign.engine.server.errors import ErrorBody
from mambalign.engine.server.protocol import Body, SamplingBody
from mambalign.engine.version import package_version

REF = "#/components/schemas/{name}"
JSON, EVENTS = "application/json", "text/event-stream"


class Route(NamedTuple):
    """A path of the server; the first line of the handler's docstring says what it is for."""

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    body: type[Body] | None = None
    content_type: str = JSON  # of the answer


def openapi_document(routes: list[Route]) -> dict[str, Any]:
    bodies = [route.body for route in routes if route.body is not None]
    refs, schemas = msgspec.json.schema_components([ErrorBody, *bodies], ref_template=REF)
    error_ref, *body_refs = refs
    by_body = dict(zip(bodies, body_refs, strict=True))
    for body, ref in by_body.items():
        add_refused_fields(schemas[ref["$ref"].rpartition("/")[2]], body)
    paths: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r"\{(\w+)(:[^}]*)?\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = operation(route, path, by_body.get(route.body), error_ref)
    bearer = {"type": "http", "scheme": "bearer", "description": "Where the server was started with keys."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mambalign", "version": package_version()},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": bearer}},
    }


def add_refused_fields(schema: dict[str, Any], body: type[Body]) -> None:
    """OpenAI's fields that are not served: of each the values that ask for nothing, and what to do instead."""
    for name, refused in body.openai_fields.items():
        if refused is not None:
            text = f"Not supported by this server: {refused.instead}."
            schema["properties"][name] = {"enum": [None, *refused.neutral], "description": text}


def operation(route: Route, path: str, body_ref: dict[str, Any] | None, error_ref: dict[str, Any]) -> dict[str, Any]:
    summary = (inspect.getdoc(route.handler) or "").partition("\n")[0]
    streams = route.body is not None and issubclass(route.body, SamplingBody)
    content_types = (JSON, EVENTS) if streams else (route.content_type,)
    wrong = {"description": "What is wrong, and with which field.", "content": {JSON: {"schema": error_ref}}}
    made: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": summary,
        "responses": {
            "200": {"description": "What was asked for.", "content": {kind: {} for kind in content_types}},
            "default": wrong,
        },
    }
    if names := re.findall(r"\{(\w+)\}", path):
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if body_ref is not None:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": body_ref}}}
    return made
