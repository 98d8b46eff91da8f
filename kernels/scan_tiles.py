"""What both recurrences over paged temporal states share: the tile of a program, and the inputs that a draft leaves.

A state is [heads, rows, columns] of a block. A program owns some rows of a head, of BLOCK_I columns a quarter. What a
draft leaves instead of its state (`Deferral`) lies at the beginning of that tile of its block, in fp32: a vector over
the columns, a value of each row, two scalars. A program reads what it has left itself, so no two of them share it.
"""

import torch
import triton
import triton.language as tl

NUM_WARPS = 2  # of a program
# Elements of the state that a thread keeps in registers. With 64, decode rows of 8B's heads take 10% less time on an
# H200, but one long prompt 17% more; for the delta rule's heads decode takes 9 to 15% less, and a prompt no more.
MAMBA2_ELEMENTS = 32
DELTA_ELEMENTS = 64
NUM_SCALARS = 2


def tile_of(num_rows: int, num_columns: int, thread_elements: int) -> tuple[int, int]:
    """(rows of a program's tile, columns of a quarter of it), powers of 2, for a head's state [rows, columns]."""
    block_i = triton.next_power_of_2(triton.cdiv(num_columns, 4))
    return min(triton.next_power_of_2(num_rows), max(1, 32 * NUM_WARPS * thread_elements // (4 * block_i))), block_i


def has_room_for_inputs(temporal_state: torch.Tensor) -> bool:
    """Whether a state [blocks, heads, rows, columns] holds what a draft leaves: each tile of either recurrence does."""
    num_rows, num_columns = temporal_state.shape[2:]
    row_bytes = num_columns * temporal_state.element_size()
    if row_bytes % 4:
        return False
    for thread_elements in (MAMBA2_ELEMENTS, DELTA_ELEMENTS):
        tile_rows, _ = tile_of(num_rows, num_columns, thread_elements)
        rows_of_last = (num_rows - 1) % tile_rows + 1
        if rows_of_last * row_bytes < 4 * (num_columns + tile_rows + NUM_SCALARS):
            return False
    return True


@triton.jit
def load_quarters(p, mask, o_i, D_STATE: tl.constexpr, BLOCK_I: tl.constexpr):
    """Elements j * BLOCK_I + i of a state row, by quarter j."""
    b_0 = tl.load(p, mask=mask & (o_i < D_STATE), other=0.0).to(tl.float32)
    b_1 = tl.load(p + BLOCK_I, mask=mask & (o_i < D_STATE - BLOCK_I), other=0.0).to(tl.float32)
    b_2 = tl.load(p + 2 * BLOCK_I, mask=mask & (o_i < D_STATE - 2 * BLOCK_I), other=0.0).to(tl.float32)
    b_3 = tl.load(p + 3 * BLOCK_I, mask=mask & (o_i < D_STATE - 3 * BLOCK_I), other=0.0).to(tl.float32)
    return b_0, b_1, b_2, b_3


@triton.jit
def store_quarters(p, mask, o_i, b_0, b_1, b_2, b_3, D_STATE: tl.constexpr, BLOCK_I: tl.constexpr):
    """As `load_quarters` reads them; past the caches, since no kernel of this step reads them."""
    dtype: tl.constexpr = p.dtype.element_ty
    tl.store(p, b_0.to(dtype), mask=mask & (o_i < D_STATE), cache_modifier=".cs")
    tl.store(p + BLOCK_I, b_1.to(dtype), mask=mask & (o_i < D_STATE - BLOCK_I), cache_modifier=".cs")
    tl.store(p + 2 * BLOCK_I, b_2.to(dtype), mask=mask & (o_i < D_STATE - 2 * BLOCK_I), cache_modifier=".cs")
    tl.store(p + 3 * BLOCK_I, b_3.to(dtype), mask=mask & (o_i < D_STATE - 3 * BLOCK_I), cache_modifier=".cs")


@triton.jit
def _fp32_at(p_tile, block, STATE_SIZE: tl.constexpr):
    return (p_tile + block.to(tl.int64) * STATE_SIZE).to(tl.int64).to(tl.pointer_type(tl.float32))


@triton.jit
def load_left_inputs(
    p_tile, block, o_r, o_i,
    STATE_SIZE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """The vector by quarters, the rows' values, and both scalars. p_tile: the tile's first element, of block 0.

    Of a negative block zeros.
    """
    p, is_there = _fp32_at(p_tile, block, STATE_SIZE), block >= 0
    found = o_i < tl.where(is_there, COLUMNS, 0)
    b_0, b_1, b_2, b_3 = load_quarters(p + o_i, found, o_i, COLUMNS, BLOCK_I)
    b_rows = tl.load(p + COLUMNS + o_r, mask=o_r < tl.where(is_there, BLOCK_R, 0), other=0.0)
    s_0 = tl.load(p + COLUMNS + BLOCK_R, mask=is_there, other=0.0)
    s_1 = tl.load(p + COLUMNS + BLOCK_R + 1, mask=is_there, other=0.0)
    return b_0, b_1, b_2, b_3, b_rows, s_0, s_1


@triton.jit
def leave_inputs(
    p_tile, block, o_r, o_i, b_0, b_1, b_2, b_3, b_rows, s_0, s_1,
    STATE_SIZE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """As `load_left_inputs` reads them."""
    p = _fp32_at(p_tile, block, STATE_SIZE)
    tl.store(p + o_i, b_0, mask=o_i < COLUMNS)
    tl.store(p + BLOCK_I + o_i, b_1, mask=o_i < COLUMNS - BLOCK_I)
    tl.store(p + 2 * BLOCK_I + o_i, b_2, mask=o_i < COLUMNS - 2 * BLOCK_I)
    tl.store(p + 3 * BLOCK_I + o_i, b_3, mask=o_i < COLUMNS - 3 * BLOCK_I)
    tl.store(p + COLUMNS + o_r, b_rows)
    tl.store(p + COLUMNS + BLOCK_R, s_0)
    tl.store(p + COLUMNS + BLOCK_R + 1, s_1)
