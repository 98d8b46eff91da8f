"""Which words a field of a body may hold, as its types say, for the message to who sent another one."""

import re
from collections.abc import Iterator

import msgspec
from msgspec.inspect import DictType, ListType, LiteralType, StructType, Type, UnionType, type_info

STEP = re.compile(r"\w+|\[[^]]*\]")  # a field's name; an index


def allowed_values(kind: type[msgspec.Struct], path: str) -> list[str]:
    """In JSON, each once; none where the types name no words.

    `path`: as msgspec writes it in its errors, behind `$.`: `messages[0].role`.
    """
    types = list(members(type_info(kind)))
    for step in STEP.findall(path):
        types = [member for outer in types for inner in within(outer, step) for member in members(inner)]
    values = [value for each in types if isinstance(each, LiteralType) for value in each.values]
    return [msgspec.json.encode(value).decode() for value in dict.fromkeys(values)]


def members(outer: Type) -> Iterator[Type]:
    """The types of a union; one that is none."""
    if isinstance(outer, UnionType):
        yield from outer.types
    else:
        yield outer


def within(outer: Type, step: str) -> Iterator[Type]:
    """What a step leads to: several types where structs differ by their tags, none where the step is another's."""
    match outer:
        case StructType():
            if step == outer.tag_field:
                yield LiteralType((outer.tag,))
            yield from (field.type for field in outer.fields if field.encode_name == step)
        case ListType() if step.startswith("["):
            yield outer.item_type
        case DictType() if step.startswith("["):
            yield outer.value_type
