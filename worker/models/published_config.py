"""What the families' readers of a published config.json do alike."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from mambalign.worker.models.loader import CheckpointError

READ_FIRST = {  # fields that decide how others are read
    "hidden_size": int, "num_attention_heads": int, "num_hidden_layers": int, "n_mamba_heads": int,
    "mamba_expand": float,
}  # fmt: skip
LISTS = (
    "attn_layer_indices", "full_attn_idxs", "layer_types", "layers_block_type", "mlp_multipliers", "mlp_only_layers",
    "mtp_layers_block_type", "ssm_multipliers", "time_step_limit",
)  # fmt: skip
LEFT_OUT = (None, "auto")
DIVISORS = frozenset({  # sizes that others are divided by
    "head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "mamba_num_heads",
    "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "n_group", "num_hidden_layers", "n_mamba_heads",
    "topk_group", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
    "block_multiple_of", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "decoder_sparse_step", "max_position_embeddings",
})  # fmt: skip


def published_fields(owner: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the dataclass `owner` as the file gives them: those left to the reader left out, eos_token_id a tuple.

    Raises CheckpointError for a number or a flag that is none, or is out of range.
    """
    names = {field.name for field in fields(owner)}
    given = {name: value for name, value in config.items() if name in names and value not in LEFT_OUT}
    kinds = get_type_hints(owner)
    for name, value in given.items():
        _check_number(name, value, kinds[name])
    eos = given.get("eos_token_id")
    if eos is not None:
        given["eos_token_id"] = tuple(eos) if isinstance(eos, list) else (eos,)
    return given


def check_kinds(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError where fields that readers count with or go through, before others, are of another kind."""
    for name, kind in READ_FIRST.items():
        if config.get(name) is not None:
            _check_number(name, config[name], kind)
    for name in LISTS:
        if not isinstance(config.get(name) or [], list):
            raise CheckpointError(f"config.json: {name} = {config[name]!r}; served: lists")


def _check_number(name: str, value: Any, kind: Any) -> None:
    """Raise CheckpointError unless a field of that kind can have the value. Other kinds are their readers' to check."""
    if kind in (int, int | None):
        least = 1 if name in DIVISORS else 0
        if type(value) is not int or value < least:
            raise CheckpointError(f"config.json: {name} = {value!r}; served: whole numbers from {least} on")
    elif kind in (float, float | None):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise CheckpointError(f"config.json: {name} = {value!r}; served: numbers")
        if name.endswith(("eps", "epsilon")) and value < 0:
            raise CheckpointError(f"config.json: {name} = {value!r}; served: numbers from 0 on")
    elif kind is bool and value not in (True, False):
        raise CheckpointError(f"config.json: {name} = {value!r}; served: true, false")


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
