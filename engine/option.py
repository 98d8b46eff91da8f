"""One option: a field of a frozen dataclass, its help text (with units) and its limits in the field's metadata.

What is here reads that metadata and knows no option by name.
"""

import math
import re
from dataclasses import field, fields
from types import NoneType, UnionType
from typing import Any, get_args

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


class ConfigError(ValueError):
    """Options that cannot be served, alone or together. The text names the option and the limit."""


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A field. metadata: `choices`, `refused` of them, `low`, `high` (inclusive), `bytes`, `positional`,
    `bench_only` (no option of `serve`)."""
    return field(default=default, metadata={"help": help, **metadata})


def build_part(owner: Any, options: dict[str, Any]) -> Any:
    """Take one dataclass's fields out of flat `options` (which shrinks) and build it; "4GiB" is parsed."""
    values = {f.name: options.pop(f.name) for f in fields(owner) if f.name in options}
    for f in fields(owner):
        if f.metadata.get("bytes") and isinstance(values.get(f.name), str):
            values[f.name] = parse_bytes(values[f.name])
    return owner(**values)


def parse_bytes(text: str) -> int:
    """Bytes of "1000000", "512MiB", "1.5GiB", "4G" (= GiB), "2GB" (= 2 * 10**9). Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and {name.lower(): factor for name, factor in _UNITS.items()}.get(match[2].lower())
    if not match or unit is None:
        raise ConfigError(f"{text!r} is not a number of bytes: write 1000000, 512MiB or 4GiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def flag(name: str) -> str:
    """The CLI's spelling of an option: `spec_tokens` -> `--spec-tokens`."""
    return "--" + name.replace("_", "-")


def allowed_types(annotation: Any) -> tuple[type, ...]:
    """`int | None` -> (int, NoneType)."""
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def check_values(part: Any) -> None:
    """Check each field of one options dataclass by itself: type, choices, range. Raises ConfigError."""
    for f in fields(part):
        value, name = getattr(part, f.name), flag(f.name)
        types = allowed_types(f.type)
        if value is None and NoneType in types:
            continue
        wrong_bool = isinstance(value, bool) and bool not in types
        if wrong_bool or not isinstance(value, (*types, int) if float in types else types):
            wanted = " or ".join("None" if t is NoneType else t.__name__ for t in types)
            raise ConfigError(f"{name} {value!r}: must be {wanted}, not {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} {value}: must be a finite number")
        choices = f.metadata.get("choices")
        refused = f.metadata.get("refused", {})
        if value in refused:
            raise ConfigError(f"{name} {value} cannot be served: {refused[value]}")
        if choices and value not in choices:
            served = ", ".join(choice for choice in choices if choice not in refused)
            raise ConfigError(f"{name} {value!r}: must be one of {served}")
        low, high = f.metadata.get("low"), f.metadata.get("high")
        if low is not None and value < low:
            raise ConfigError(f"{name} {value}: must be at least {low}")
        if high is not None and value > high:
            raise ConfigError(f"{name} {value}: must be at most {high}")
        if value == "":
            raise ConfigError(f"{name}: must not be empty")
