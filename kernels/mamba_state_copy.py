"""One state block copied to another, with a shift by accepted tokens: what every migration kernel is made of.

Owns the flat per-state metadata that kernels read, and the cut of a state into tiles. Knows nothing of requests.
A temporal state or carry is copied whole. A conv state is shifted left by `token_bias` slots along its state_len;
the last `token_bias` slots of the destination are undefined afterwards.
"""

import ctypes
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

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
    access_size: int  # 16 where base, stride and size allow it, else 1
    first_tile: int
    tile_size: int  # bytes of the destination that one tile covers


def _field(name: str) -> tl.constexpr:
    return tl.constexpr(StateMeta._fields.index(name))


# The same for kernels, which read field F of state s at `p_state_meta + s * META_FIELDS + F`.
META_FIELDS = tl.constexpr(len(StateMeta._fields))
_BASE, _BLOCK_STRIDE, _ELEMENT_SIZE, _INNER_SIZE = map(_field, StateMeta._fields[:4])
_KIND, _GROUP, _ROW_STRIDE = _field("kind"), _field("group"), _field("row_stride")
_ACCESS_SIZE, _FIRST_TILE, _TILE_SIZE = _field("access_size"), _field("first_tile"), _field("tile_size")
_CONV = tl.constexpr(CONV)


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
        if dim_first:  # whole rows, sixteen at a time so that tiles begin on an aligned address
            tile_size = max(16, copy_block_size // row_stride // 16 * 16) * row_stride
        else:
            alignment = gcd(alignment, row_stride)
    access_size = 16 if alignment % 16 == 0 else 1
    return StateMeta(
        tensor.data_ptr(), block_stride, element_size, inner_size, STATE_KINDS[state.kind], state.group, state_len,
        row_count, row_stride, access_size, first_tile, tile_size,
    )  # fmt: skip


@triton.jit
def _next_unit(p_tickets, num_programs):
    """The next tile that nobody has taken; the first `num_programs` belong to the programs without asking."""
    return num_programs + tl.atomic_add(p_tickets, 1, sem="relaxed")


@triton.jit
def _return_tickets(p_tickets, num_programs):
    """The last program to leave clears the counters for the next launch."""
    if tl.atomic_add(p_tickets + 1, 1, sem="relaxed") == num_programs - 1:
        tl.store(p_tickets, 0)
        tl.store(p_tickets + 1, 0)


@triton.jit
def _move_words(source, dest, shift, num_bytes, source_bytes, COPY_BLOCK_SIZE: tl.constexpr):
    """`dest[k] = source[k + shift]` for k < num_bytes, like memmove for a move to the left.

    source, dest and source_bytes (what may be read) are multiples of 16, shift is any number of bytes. The last 16
    bytes that are written may lie in part past num_bytes; those are undefined.
    """
    WORDS: tl.constexpr = COPY_BLOCK_SIZE // 8
    skipped, bits = shift // 8, (shift % 8 * 8).to(tl.uint64)
    straddles = shift % 8 > 0  # a word of dest lies across two of source
    source_words = source_bytes // 8 - skipped
    high_words = tl.where(straddles, source_words, 0)
    num_words = (num_bytes + 15) // 16 * 2
    p_source = source.to(tl.pointer_type(tl.uint64)) + skipped
    p_dest = dest.to(tl.pointer_type(tl.uint64))
    for start in range(0, num_words, WORDS):
        o = start + tl.arange(0, WORDS)
        low = tl.load(p_source + o, mask=o < tl.minimum(num_words, source_words), other=0)
        high = tl.load(p_source + o + 1, mask=o + 1 < tl.minimum(num_words + 1, high_words), other=0)
        word = tl.where(straddles, (low >> bits) | (high << ((64 - bits) & 63)), low)
        tl.debug_barrier()  # every thread has read before one writes
        tl.store(tl.multiple_of(p_dest + o, 16), word, mask=o < num_words)


@triton.jit
def _move_bytes(source, dest, num_bytes, COPY_BLOCK_SIZE: tl.constexpr):
    """num_bytes between any addresses, like memmove for a move to the left."""
    BYTES: tl.constexpr = COPY_BLOCK_SIZE // 8
    p_source, p_dest = source.to(tl.pointer_type(tl.uint8)), dest.to(tl.pointer_type(tl.uint8))
    for start in range(0, num_bytes, BYTES):
        o = start + tl.arange(0, BYTES)
        mask = o < num_bytes
        value = tl.load(p_source + o, mask=mask)
        tl.debug_barrier()
        tl.store(p_dest + o, value, mask=mask)


@triton.jit
def _move_shifted(source, dest, shift, num_bytes, source_bytes, access_size, COPY_BLOCK_SIZE: tl.constexpr):
    """`dest[k] = source[k + shift]` for k < num_bytes."""
    if access_size == 16:
        _move_words(source, dest, shift, num_bytes, source_bytes, COPY_BLOCK_SIZE)
    else:
        _move_bytes(source + shift, dest, num_bytes, COPY_BLOCK_SIZE)


@triton.jit
def _copy_mamba_state_block(
    p_meta,
    p_table,
    table_width,
    i_tile,
    source_column,
    dest_column,
    token_bias,
    p_tickets,
    num_programs,
    COPY_BLOCK_SIZE: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
):
    """One tile of one state of one row: `copy_mamba_state_block_reference` cut into tiles that may run in any order.

    p_meta: the state's metadata. p_table: the row's block tables, `[groups, table_width]`.
    A tile owns a span of the destination block: rows of a DS conv state (shifted within themselves), bytes of any
    other. Within one block an SD conv state is cut along dim instead, and every tile moves its channels slot by slot.
    Returns the running number of the program's next tile.
    """
    kind, access_size = tl.load(p_meta + _KIND), tl.load(p_meta + _ACCESS_SIZE)
    inner_size, tile_size = tl.load(p_meta + _INNER_SIZE), tl.load(p_meta + _TILE_SIZE)
    base, block_stride = tl.load(p_meta + _BASE), tl.load(p_meta + _BLOCK_STRIDE)
    row_stride, element_size = tl.load(p_meta + _ROW_STRIDE), tl.load(p_meta + _ELEMENT_SIZE)
    offset = (i_tile - tl.load(p_meta + _FIRST_TILE)) * tile_size
    span = tl.minimum(tile_size, inner_size - offset)

    p_table += tl.load(p_meta + _GROUP) * table_width
    from_column = source_column
    if kind != _CONV:
        from_column += token_bias
    source_block = tl.load(p_table + from_column).to(tl.int64)
    dest_block = tl.load(p_table + dest_column).to(tl.int64)
    source, dest = base + source_block * block_stride, base + dest_block * block_stride

    if (kind != _CONV) & (access_size == 16):  # nearly all bytes: one vector a tile, the ticket while it is read
        o = tl.arange(0, COPY_BLOCK_SIZE // 8)
        p_source = tl.multiple_of((source + offset).to(tl.pointer_type(tl.int64)) + o, 16)
        p_dest = tl.multiple_of((dest + offset).to(tl.pointer_type(tl.int64)) + o, 16)
        mask = o < tl.where(source_block == dest_block, 0, span // 16) * 2
        value = tl.load(p_source, mask=mask)
        unit = _next_unit(p_tickets, num_programs)
        tl.store(p_dest, value, mask=mask)
    else:
        unit = _next_unit(p_tickets, num_programs)
        shift, rest = span * 0, span
        if kind == _CONV:
            if CONV_STATE_DIM_FIRST:
                shift = token_bias * element_size
            else:
                shift, rest = token_bias * row_stride, inner_size - offset
        if source_block != dest_block:
            num_bytes = tl.minimum(span, rest - shift)
            _move_shifted(source + offset, dest + offset, shift, num_bytes, rest, access_size, COPY_BLOCK_SIZE)
        elif shift > 0:
            if CONV_STATE_DIM_FIRST:
                _move_shifted(source + offset, dest + offset, shift, span - shift, span, access_size, COPY_BLOCK_SIZE)
            else:
                lanes = tl.minimum(tile_size, row_stride - offset)
                for slot in range(0, inner_size - shift, row_stride):
                    to = dest + offset + slot
                    _move_shifted(to + shift, to, shift * 0, lanes, lanes, access_size, COPY_BLOCK_SIZE)
    return unit


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
