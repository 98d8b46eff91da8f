"""One state block copied to another, with a shift by accepted tokens: what every migration kernel is made of.

Owns the copy of a tile, and how programs share a row's tiles; what a tile is says `mamba_state_table`.
A temporal state or carry is copied whole. A conv state is shifted left by `token_bias` slots along its state_len;
the last `token_bias` slots of the destination are undefined afterwards.
"""

import ctypes

import torch
import triton
import triton.language as tl

from mambalign.kernels.mamba_state_table import CONV, StateMeta, _tile_meta
from mambalign.kernels.move_bytes import move_bytes

# Of the persistent copy kernels: so few registers that six programs run on a multiprocessor at once.
LAUNCH_OPTIONS = {"num_warps": 4, "num_stages": 1, "maxnreg": 80}


@triton.jit
def _next_unit(p_tickets, num_programs):
    """The next tile that nobody has taken; the first `num_programs` belong to the programs without asking."""
    return num_programs + tl.atomic_add(p_tickets, 1, sem="relaxed")


@triton.jit
def _return_tickets(p_tickets, unit, num_units, num_programs):
    """Clear the counter for the next launch. A copied tile draws one ticket: the last ends the launch."""
    if (num_units > 0) & (unit == num_programs + num_units - 1):
        tl.store(p_tickets, 0)


@triton.jit
def _load_shifted(p_source, o, shift, num_words, source_words):
    """Words `o` of what begins `shift` bytes behind `p_source - o`, where `source_words` may be read."""
    skipped, bits = shift // 8, (shift % 8 * 8).to(tl.uint64)
    low = tl.load(p_source + skipped, mask=o < tl.minimum(num_words, source_words - skipped), other=0)
    straddles = shift % 8 > 0  # a word lies across two of the source
    high_words = tl.where(straddles, tl.minimum(num_words + 1, source_words - skipped), 0)
    high = tl.load(p_source + skipped + 1, mask=o + 1 < high_words, other=0)
    return tl.where(straddles, (low >> bits) | (high << ((64 - bits) & 63)), low)


@triton.jit
def _copy_mamba_state_block(
    tile_meta,
    p_table,
    table_width,
    source_column,
    dest_column,
    token_bias,
    p_tickets,
    num_programs,
    COPY_BLOCK_SIZE: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
):
    """One tile of one state of one row: `copy_mamba_state_block_reference` cut into tiles that may run in any order.

    tile_meta: the tile's `_tile_meta`. p_table: the row's block tables, `[groups, table_width]`.
    A tile owns a span of the destination block: rows of a DS conv state (shifted within themselves), bytes of any
    other. Within one block an SD conv state is cut along dim instead, and every tile moves its channels slot by slot.
    Returns the running number of the program's next tile: its ticket is drawn while the tile is read.
    """
    base, block_stride, group, inner_size, slot_stride, access_size, tile_size, offset = tile_meta
    p_table += group * table_width
    from_column = tl.where(slot_stride > 0, source_column, source_column + token_bias)
    source_block, dest_block = tl.load(p_table + from_column).to(tl.int64), tl.load(p_table + dest_column).to(tl.int64)

    shift, span = token_bias * slot_stride, tl.minimum(tile_size, inner_size - offset)
    num_bytes = span - shift if CONV_STATE_DIM_FIRST else tl.minimum(span, inner_size - offset - shift)
    within = source_block == dest_block
    num_bytes = tl.where(within & (shift == 0), 0, num_bytes)
    slides = within & (num_bytes > 0)
    source, dest = base + source_block * block_stride + offset, base + dest_block * block_stride + offset

    o = tl.arange(0, COPY_BLOCK_SIZE // 8)
    p_source, p_dest = source.to(tl.pointer_type(tl.uint64)) + o, dest.to(tl.pointer_type(tl.uint64)) + o
    p_dest = tl.multiple_of(p_dest, 16)
    num_words = (num_bytes + 15) // 16 * 2  # the last 16 bytes may lie in part past num_bytes; those are undefined
    is_vector = (access_size == 16) & (num_bytes <= COPY_BLOCK_SIZE)
    if is_vector & (shift % 16 == 0) & (slides == 0):  # nearly all bytes
        value = tl.load(tl.multiple_of(p_source + shift // 8, 16), mask=o < num_words)
        unit = _next_unit(p_tickets, num_programs)
        tl.store(p_dest, value, mask=o < num_words)
    elif CONV_STATE_DIM_FIRST:
        if is_vector:
            value = _load_shifted(p_source, o, shift, num_words, span // 8)
            unit = _next_unit(p_tickets, num_programs)
            tl.debug_barrier()  # every thread has read before one writes
            tl.store(p_dest, value, mask=o < num_words)
        else:
            unit = _next_unit(p_tickets, num_programs)
            move_bytes(source + shift, dest, num_bytes, 1, COPY_BLOCK_SIZE)
    else:
        unit = _next_unit(p_tickets, num_programs)
        num_bytes = tl.where(slides, tl.minimum(tile_size, slot_stride - offset), num_bytes)
        for slot in range(0, tl.where(slides, inner_size - shift, 1), tl.maximum(slot_stride, 1)):
            move_bytes(source + shift + slot, dest + slot, num_bytes, access_size, COPY_BLOCK_SIZE)
    return unit


@triton.jit
def _copy_mamba_states(
    tile_meta,
    p_block_table,
    num_groups,
    table_width,
    slot,
    source_column,
    dest_column,
    token_bias,
    unit,
    first_unit,
    p_state_meta,
    p_tile_state,
    p_tickets,
    num_tiles,
    num_conv_tiles,
    num_programs,
    COPY_BLOCK_SIZE: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
):
    """This program's share of one row's states. The row's tiles are the units from `first_unit` on.

    unit: the program's next tile; tile_meta is that tile's, should it be one of this row. A row whose temporal states
    lie where they must has conv tiles only. Returns unit, and the first unit of the next row.
    """
    in_place = source_column + token_bias == dest_column
    row_tiles = tl.where(in_place, num_conv_tiles, num_tiles)
    p_table = p_block_table + slot.to(tl.int64) * num_groups * table_width
    while unit < first_unit + row_tiles:
        unit = _copy_mamba_state_block(
            tile_meta, p_table, table_width, source_column, dest_column, token_bias, p_tickets, num_programs,
            COPY_BLOCK_SIZE, CONV_STATE_DIM_FIRST,
        )  # fmt: skip
        tile_meta = _tile_meta(p_state_meta, p_tile_state, unit - first_unit, row_tiles, CONV_STATE_DIM_FIRST)
    return unit, first_unit + row_tiles


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
