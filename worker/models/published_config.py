"""What the families' readers of a published config.json do alike."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from mambalign.worker.models.loader import CheckpointError


def published_fields(owner: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the dataclass `owner` as the file gives them: nulls left out, eos_token_id a tuple."""
    names = {field.name for field in fields(owner)}
    given = {name: value for name, value in config.items() if name in names and value is not None}
    eos = given.get("eos_token_id")
    if eos is not None:
        given["eos_token_id"] = tuple(eos) if isinstance(eos, list) else (eos,)
    return given


def check_values(config: Mapping[str, Any], served: Mapping[str, Sequence[Any]]) -> None:
    """Raise CheckpointError for a field that is there and has none of the served values."""
    for field, values in served.items():
        if config.get(field) is not None and config[field] not in values:
            raise CheckpointError(f"config.json: {field} = {config[field]!r}; served: {', '.join(map(str, values))}")


def layer_kinds(given: Sequence[Any], served: Collection[str], field: str = "layer_types") -> tuple[str, ...]:
    """The field's kinds of layers, raising CheckpointError for those that are not served."""
    unknown = sorted({str(kind) for kind in given} - {*served})
    if unknown:
        raise CheckpointError(f"config.json: {field} with {', '.join(unknown)}; served: {', '.join(served)}")
    return tuple(given)
