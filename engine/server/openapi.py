"""The OpenAPI document of this server, at /openapi.json: made of its routes and of the types that read bodies.

What a type cannot say (limits, fields that exclude each other) is checked behind it, and told in the 400.
"""

import inspect
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from mambalign.engine.server.protocol import Body

REF = "#/components/schemas/{name}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

BodyOfPath = Mapping[str, type[Body]]


def openapi_document(router: web.UrlDispatcher, bodies: BodyOfPath) -> dict[str, Any]:
    """`bodies`: of the paths whose requests have one."""
    _, schemas = msgspec.json.schema_components(bodies.values(), ref_template=REF)
    for body in bodies.values():
        schemas[body.__name__]["properties"] |= dict(refused_properties(body))
    paths: dict[str, dict[str, Any]] = {}
    for route in router.routes():
        if route.method != "HEAD":  # aiohttp adds it to every GET
            path = route.resource.canonical
            paths.setdefault(path, {})[route.method.lower()] = operation(route, bodies.get(path))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mambalign", "version": version("mambalign")},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def refused_properties(body: type[Body]) -> Iterator[tuple[str, dict[str, Any]]]:
    """OpenAI's fields that are not served: only the values that ask for nothing are taken."""
    for name, refused in body.openai_fields.items():
        if refused is not None:
            yield name, {"enum": [None, *refused.neutral], "description": f"Not supported: {refused.instead}."}


def operation(route: web.AbstractRoute, body: type[Body] | None) -> dict[str, Any]:
    failed = {"description": "What went wrong.", "content": json_content({"$ref": REF.format(name="Error")})}
    operation: dict[str, Any] = {
        "summary": (inspect.getdoc(route.handler) or "").partition("\n")[0],
        "operationId": route.handler.__name__,
        "responses": {"200": {"description": "The answer."}, "default": failed},
    }
    names = route.resource.get_info().get("pattern")
    if names is not None:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names.groupindex
        ]
    if body is not None:
        schema = {"$ref": REF.format(name=body.__name__)}
        operation["requestBody"] = {"required": True, "content": json_content(schema)}
    return operation


def json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
