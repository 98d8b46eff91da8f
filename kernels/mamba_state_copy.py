"""One state block copied to another, with a shift by accepted tokens: what every migration kernel is made of.

Owns the flat per-state metadata that kernels read, and the cut of a state into tiles. Knows nothing of requests.
A temporal state or carry is copied whole. A conv state is shifted left by `token_bias` slots along its state_len;
the last `token_bias` slots of the destination are undefined afterwards.
"""

import ctypes
from math import gcd
from typing import NamedTuple

import torch

CONV, TEMPORAL, CARRY = 0, 1, 2
STATE_KINDS = {"conv": CONV, "temporal": TEMPORAL, "carry": CARRY}


class MambaState(NamedTuple):
    """A state tensor as the engine holds it: `[num_blocks, ...]`, each block contiguous, blocks any stride apart."""

    tensor: torch.Tensor
    kind: str  # "conv" | "temporal" | "carry"
    group: int = 0  # which block table names its blocks


class StateMeta(NamedTuple):
    """One row of the metadata table, int64. Sizes in bytes."""

    base: int  # address of block 0
    block_stride: int
    element_size: int
    inner_size: int  # bytes of one block
    kind: int
    group: int
    state_len: int  # conv slots, 1 for others
    row_count: int  # stored rows of a conv block: state_len slots (SD) or dim channels (DS)
    row_stride: int  # bytes of one stored row
    access_size: int  # 16, 8 or 1: widest access that base, stride and size allow
    first_tile: int
    tile_size: int  # bytes of the destination that one tile covers


NUM_META_FIELDS = len(StateMeta._fields)


def describe_states(
    states: list[MambaState], conv_state_dim_first: bool, copy_block_size: int
) -> tuple[list[StateMeta], list[int]]:
    """Metadata of every state, and for each tile the state that it belongs to.

    Raises ValueError for a state whose blocks are not contiguous, overlap, or have an unknown kind.
    """
    metas: list[StateMeta] = []
    tile_states: list[int] = []
    for i, state in enumerate(states):
        meta = _describe(state, conv_state_dim_first, copy_block_size, len(tile_states))
        metas.append(meta)
        tile_states += [i] * -(-meta.inner_size // meta.tile_size)
    return metas, tile_states


def _describe(state: MambaState, dim_first: bool, copy_block_size: int, first_tile: int) -> StateMeta:
    tensor, element_size = state.tensor, state.tensor.element_size()
    if state.kind not in STATE_KINDS:
        raise ValueError(f"unknown state kind {state.kind!r}; known: {', '.join(STATE_KINDS)}")
    if tensor.numel() == 0 or not tensor[0].is_contiguous():
        raise ValueError(f"a block of a {state.kind} state must be contiguous, got strides {tensor.stride()}")
    inner_size = tensor[0].numel() * element_size
    block_stride = tensor.stride(0) * element_size
    if len(tensor) > 1 and block_stride < inner_size:
        raise ValueError(f"blocks of {inner_size} bytes overlap: they are {block_stride} bytes apart")
    alignment = gcd(tensor.data_ptr(), block_stride, inner_size)
    row_count, row_stride, state_len, tile_size = 1, inner_size, 1, copy_block_size
    if state.kind == "conv":
        if tensor.dim() != 3:
            raise ValueError(f"a conv state has 3 dimensions, [blocks, state_len, dim] or its DS form: {tensor.shape}")
        row_count, row_stride = tensor.shape[1], tensor.shape[2] * element_size
        state_len = tensor.shape[2 if dim_first else 1]
        if dim_first:  # whole rows, eight at a time so that tiles begin on a word
            tile_size = max(8, copy_block_size // row_stride // 8 * 8) * row_stride
        else:
            alignment = gcd(alignment, row_stride)
    access_size = next(size for size in (16, 8, 1) if alignment % size == 0)
    return StateMeta(
        tensor.data_ptr(), block_stride, element_size, inner_size, STATE_KINDS[state.kind], state.group, state_len,
        row_count, row_stride, access_size, first_tile, tile_size,
    )  # fmt: skip


def bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    """Host memory as a uint8 tensor."""
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def copy_mamba_state_block_reference(
    meta: StateMeta,
    table_row: list[int],
    source_column: int,
    dest_column: int,
    token_bias: int,
    conv_state_dim_first: bool,
) -> None:
    """Reference of `_copy_mamba_state_block`, one whole block in host memory. `table_row`: column -> block id."""
    is_conv = meta.kind == CONV
    source = table_row[source_column if is_conv else source_column + token_bias]
    dest = table_row[dest_column]
    p_source, p_dest = meta.base + source * meta.block_stride, meta.base + dest * meta.block_stride
    if is_conv and conv_state_dim_first:
        shape = (meta.row_count, meta.row_stride)
        shift = token_bias * meta.element_size
        shifted = bytes_at(p_source, meta.inner_size).view(shape)[:, shift:].clone()
        bytes_at(p_dest, meta.inner_size).view(shape)[:, : meta.row_stride - shift] = shifted
    else:
        shift = token_bias * meta.row_stride if is_conv else 0
        ctypes.memmove(p_dest, p_source + shift, meta.inner_size - shift)
