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

from mambalign.kernels.launch import persistent_programs

CONV, TEMPORAL, CARRY = 0, 1, 2
STATE_KINDS = {"conv": CONV, "temporal": TEMPORAL, "carry": CARRY}
# Of the persistent copy kernels: so few registers that six programs run on a multiprocessor at once.
LAUNCH_OPTIONS = {"num_warps": 4, "num_stages": 1, "maxnreg": 80}


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


class StateTable(NamedTuple):
    """Every state that moves, as the fused kernels read it; made once, on the states' device."""

    metas: list[StateMeta]
    state_meta: torch.Tensor  # int64 [states, fields of StateMeta]
    tile_state: torch.Tensor  # int32 [tiles], the state that a tile belongs to; tiles of conv states come first
    tickets: torch.Tensor  # int32 [1], 0 before and after a launch (the references need none)
    num_tiles: int
    num_conv_tiles: int
    conv_state_dim_first: bool
    copy_block_size: int  # bytes that a program holds in registers at a time, a power of two
    num_programs: int  # of a launch

    @classmethod
    def of(
        cls,
        states: list[MambaState],
        conv_state_dim_first: bool,
        copy_block_size: int,
        num_programs: int | None = None,
    ) -> "StateTable":
        """`num_programs` None: what suits the device. Raises ValueError as `describe_states` does."""
        metas = describe_states(states, conv_state_dim_first, copy_block_size)
        device = states[0].tensor.device
        tiles = {i: -(-meta.inner_size // meta.tile_size) for i, meta in enumerate(metas)}
        tile_states = [i for i in sorted(tiles, key=lambda i: metas[i].first_tile) for _ in range(tiles[i])]
        return cls(
            metas,
            torch.tensor(metas, dtype=torch.int64, device=device),
            torch.tensor(tile_states, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            len(tile_states),
            sum(tiles[i] for i, meta in enumerate(metas) if meta.kind == CONV),
            conv_state_dim_first,
            copy_block_size,
            num_programs or persistent_programs(device),
        )

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return self.state_meta.nbytes + self.tile_state.nbytes + self.tickets.nbytes


def describe_states(states: list[MambaState], conv_state_dim_first: bool, copy_block_size: int) -> list[StateMeta]:
    """Metadata of every state, in their order; tiles are numbered conv states first.

    Raises ValueError for a state whose blocks are not contiguous, overlap, are huge, or have an unknown kind.
    """
    metas = [_describe(state, conv_state_dim_first, copy_block_size) for state in states]
    first_tile = 0
    for i in sorted(range(len(metas)), key=lambda i: metas[i].kind != CONV):
        metas[i] = metas[i]._replace(first_tile=first_tile)
        first_tile += -(-metas[i].inner_size // metas[i].tile_size)
    return metas


def _describe(state: MambaState, dim_first: bool, copy_block_size: int) -> StateMeta:
    tensor, element_size = state.tensor, state.tensor.element_size()
    if state.kind not in STATE_KINDS:
        raise ValueError(f"unknown state kind {state.kind!r}; known: {', '.join(STATE_KINDS)}")
    if tensor.numel() == 0 or not tensor[0].is_contiguous():
        raise ValueError(f"a block of a {state.kind} state must be contiguous, got strides {tensor.stride()}")
    inner_size = tensor[0].numel() * element_size
    if inner_size >= 1 << 31:
        raise ValueError(f"a block of {inner_size} bytes is too large: its tiles are addressed in 32 bits")
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
        row_count, row_stride, access_size, 0, tile_size,
    )  # fmt: skip


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
def _tile_meta(p_state_meta, p_tile_state, i_tile, num_tiles, CONV_STATE_DIM_FIRST: tl.constexpr):
    """What the metadata says of a tile: nothing that depends on a row, so that it is read while the row is decided.

    All int32 but base and block_stride. `slot_stride`: bytes from one conv slot to the next, 0 for a state that is
    copied whole. `offset`: where the tile begins in its block. Past the last tile nothing is read.
    """
    is_tile = i_tile < num_tiles
    p_meta = p_state_meta + tl.load(p_tile_state + i_tile, mask=is_tile, other=0) * META_FIELDS
    base = tl.load(p_meta + _BASE, mask=is_tile, other=0)
    block_stride = tl.load(p_meta + _BLOCK_STRIDE, mask=is_tile, other=0)
    group = tl.load(p_meta + _GROUP, mask=is_tile, other=0).to(tl.int32)
    inner_size = tl.load(p_meta + _INNER_SIZE, mask=is_tile, other=0).to(tl.int32)
    access_size = tl.load(p_meta + _ACCESS_SIZE, mask=is_tile, other=0).to(tl.int32)
    tile_size = tl.load(p_meta + _TILE_SIZE, mask=is_tile, other=0).to(tl.int32)
    first_tile = tl.load(p_meta + _FIRST_TILE, mask=is_tile, other=0).to(tl.int32)
    slot_stride = tl.load(p_meta + (_ELEMENT_SIZE if CONV_STATE_DIM_FIRST else _ROW_STRIDE), mask=is_tile, other=0)
    slot_stride = tl.where(tl.load(p_meta + _KIND, mask=is_tile, other=0) == _CONV, slot_stride, 0).to(tl.int32)
    offset = (i_tile - first_tile) * tile_size
    return base, block_stride, group, inner_size, slot_stride, access_size, tile_size, offset


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
def _move_elements(source, dest, num_elements, ELEMENT: tl.constexpr, ALIGNMENT: tl.constexpr, AT_A_TIME: tl.constexpr):
    p_source, p_dest = source.to(tl.pointer_type(ELEMENT)), dest.to(tl.pointer_type(ELEMENT))
    for start in range(0, num_elements, AT_A_TIME):
        o = start + tl.arange(0, AT_A_TIME)
        mask = o < num_elements
        value = tl.load(tl.multiple_of(p_source + o, ALIGNMENT), mask=mask)
        tl.debug_barrier()  # every thread has read before one writes
        tl.store(tl.multiple_of(p_dest + o, ALIGNMENT), value, mask=mask)


@triton.jit
def _move(source, dest, num_bytes, access_size, COPY_BLOCK_SIZE: tl.constexpr):
    """num_bytes between any addresses, like memmove for a move to the left. access_size 16: all are multiples of 16."""
    if access_size == 16:
        _move_elements(source, dest, num_bytes // 8, tl.uint64, 16, COPY_BLOCK_SIZE // 16)
    else:
        _move_elements(source, dest, num_bytes, tl.uint8, 1, COPY_BLOCK_SIZE // 8)


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
            _move(source + shift, dest, num_bytes, 1, COPY_BLOCK_SIZE)
    else:
        unit = _next_unit(p_tickets, num_programs)
        num_bytes = tl.where(slides, tl.minimum(tile_size, slot_stride - offset), num_bytes)
        for slot in range(0, tl.where(slides, inner_size - shift, 1), tl.maximum(slot_stride, 1)):
            _move(source + shift + slot, dest + slot, num_bytes, access_size, COPY_BLOCK_SIZE)
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
