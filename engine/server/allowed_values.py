"""Which words a field of a body may hold, as its types say, for the message to who sent another one."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.inspect import DictType, ListType, LiteralType, StructType, Type, UnionType, type_info

STEP = re.compile(r"\w+|\[[^]]*\]")  # a field's name; an index


def allowed_values(kind: type[msgspec.Struct], raw: Any, path: str) -> list[str]:
    """In JSON, each once; none where the types name no words.

    `raw`: the body; `path`: as msgspec writes it in its errors, behind `$.`: `messages[0].role`.
    """
    types = list(members(type_info(kind)))
    for step in STEP.findall(path):
        types = [member for outer in types for inner in within(outer, raw, step) for member in members(inner)]
        raw = value_at(raw, step)
    values = [value for each in types if isinstance(each, LiteralType) for value in each.values]
    return [msgspec.json.encode(value).decode() for value in dict.fromkeys(values)]


def members(outer: Type) -> Iterator[Type]:
    """The types of a union; one that is none."""
    if isinstance(outer, UnionType):
        yield from outer.types
    else:
        yield outer


def within(outer: Type, raw: Any, step: str) -> Iterator[Type]:
    """What a step into `raw` leads to: its tag, or the fields of the struct that it is by its tag; an item."""
    match outer:
        case StructType() if step == outer.tag_field:
            yield LiteralType((outer.tag,))
        case StructType() if outer.tag_field is None or value_at(raw, outer.tag_field) == outer.tag:
            yield from (field.type for field in outer.fields if field.encode_name == step)
        case ListType() if step.startswith("["):
            yield outer.item_type
        case DictType() if step.startswith("["):
            yield outer.value_type


def value_at(raw: Any, step: str) -> Any:
    """None where there is none."""
    match raw:
        case dict():
            return raw.get(step)
        case list() if step.strip("[]").isdecimal():
            return raw[int(step.strip("[]"))]
    return None
