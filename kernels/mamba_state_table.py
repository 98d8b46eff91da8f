"""The states that migration kernels move, as flat metadata that they read, and each state's cut into tiles.

Knows nothing of requests, nor of how a tile is copied (`mamba_state_copy`).
"""

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mambalign.kernels.launch import persistent_programs

CONV, TEMPORAL, CARRY = 0, 1, 2
STATE_KINDS = {"conv": CONV, "temporal": TEMPORAL, "carry": CARRY}
COPY_BLOCK_SIZE = 8192  # bytes that a program holds in registers at a time
INTERPRETED_COPY_BLOCK_SIZE = 1 << 18  # the interpreter pays by the tile, whatever its size


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
        copy_block_size: int | None = None,
        num_programs: int | None = None,
    ) -> "StateTable":
        """None for `copy_block_size` or `num_programs`: what suits the device. Raises as `describe_states` does."""
        device = states[0].tensor.device
        if copy_block_size is None:
            copy_block_size = COPY_BLOCK_SIZE if device.type == "cuda" else INTERPRETED_COPY_BLOCK_SIZE
        metas = describe_states(states, conv_state_dim_first, copy_block_size)
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


def describe_states(
    states: list[MambaState], conv_state_dim_first: bool, copy_block_size: int = COPY_BLOCK_SIZE
) -> list[StateMeta]:
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
