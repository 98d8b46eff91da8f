"""The scalar path of state migration: a pointer list, one entry a state and row, and `batch_memcpy`.

What the fused copy is checked by, and what runs where no `MambaSpecDecodeGPUContext` is given. Decides nothing.
"""

from typing import NamedTuple

import numpy as np
import torch

from mambalign.kernels.batch_memcpy import batch_memcpy
from mambalign.kernels.mamba_state_table import CONV, StateMeta, describe_states
from mambalign.worker.mamba_columns import PrecopyInfo
from mambalign.worker.state_cache import StateCache


class MambaCopySpec(NamedTuple):
    """Bytes to copy: `num_bytes` from `source_address`, to the start of the destination block."""

    source_address: int
    num_bytes: int


def get_conv_copy_spec(
    meta: StateMeta, table_row: np.ndarray, source_column: int, num_accepted: int, conv_layout: str
) -> MambaCopySpec:
    """The conv window of a row that accepted `num_accepted` tokens: `block[source_column]` without its oldest slots.

    In DS the window is a strided piece of every channel, which one copy cannot express: only the fused kernel does it.
    """
    assert conv_layout == "SD" or num_accepted == 1, (
        f"a DS conv state with num_accepted {num_accepted} > 1 has no contiguous tail; it needs the fused copy"
    )
    shift = (num_accepted - 1) * meta.row_stride
    address = meta.base + int(table_row[source_column]) * meta.block_stride
    return MambaCopySpec(address + shift, meta.inner_size - shift)


def get_temporal_copy_spec(
    meta: StateMeta, table_row: np.ndarray, source_column: int, num_accepted: int, conv_layout: str
) -> MambaCopySpec:
    """A temporal state or carry: the whole block that the last accepted token left."""
    block = int(table_row[source_column + num_accepted - 1])
    return MambaCopySpec(meta.base + block * meta.block_stride, meta.inner_size)


class MambaCopyList:
    """Pointer list of the scalar path: sources, destinations, sizes."""

    def __init__(self) -> None:
        self.sources: list[int] = []
        self.dests: list[int] = []
        self.sizes: list[int] = []


def collect_mamba_copy_meta(
    copies: MambaCopyList,
    metas: list[StateMeta],
    conv_layout: str,
    table_row: np.ndarray,
    info: PrecopyInfo,
) -> None:
    """Append one row's copies, one a state; a copy of a block onto itself is left out. `table_row`: group 0's."""
    for meta in metas:
        get_copy_spec = get_conv_copy_spec if meta.kind == CONV else get_temporal_copy_spec
        spec = get_copy_spec(meta, table_row, info.source_column, info.token_bias + 1, conv_layout)
        dest = meta.base + int(table_row[info.dest_column]) * meta.block_stride
        if dest != spec.source_address:
            copies.sources.append(spec.source_address)
            copies.dests.append(dest)
            copies.sizes.append(spec.num_bytes)


def do_mamba_copy_block(copies: MambaCopyList, device: torch.device | str) -> None:
    """Run a pointer list."""
    if copies.sizes:
        batch_memcpy(*torch.tensor([copies.sources, copies.dests, copies.sizes]).to(device))


def copy_scalar(block_table: np.ndarray, moves: list[tuple[int, PrecopyInfo]], cache: StateCache) -> None:
    """Move every state of these rows. `block_table`: int32 `[rows, columns]`, group 0's block ids."""
    states = cache.mamba_states()
    metas = describe_states(states, cache.conv_layout == "DS")
    copies = MambaCopyList()
    for row, info in moves:
        collect_mamba_copy_meta(copies, metas, cache.conv_layout, block_table[row], info)
    do_mamba_copy_block(copies, states[0].tensor.device)
