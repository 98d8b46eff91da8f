"""Paged attention on a GPU. A query's bits depend on its position and its keys only.

Keys are walked in tiles, and tiles belong to splits, both at absolute multiples. (m, l, acc) - the largest score, the
sum of weights, the sum of weighted values - start anew in each split, and splits are merged in order: in a second
launch when few queries leave splits to run side by side, else one after the other. Either way by `attend_split` and
`merge`, over tiles of as many keys. A tile without visible keys multiplies by an exact 1 and adds exact zeros, so it
does not matter what the other queries of a tile see, nor how many they are: rows of a product are independent and add
up in one order, and weights are added as whole numbers, in any order. A product that meets a sum is either in a
`tl.fma` or the addend of one: nothing is left to contract. Invisible keys and values are 0 on load: what lies in a
block past a row's end (NaN, perhaps) is never computed with.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.attention_tile import attend_split, head_offsets, load_blocks, load_queries, merge, normalise
from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.sigmoid_mul import gated

SPLIT_TOKENS = 512
KEY_TILE = {2: 64, 4: 32}  # keys of a tile by bytes of a number: part of the order of addition
MOST_SPLIT_ROWS = {2: 64, 4: 32}  # of queries whose splits run side by side
MERGE_ROWS = 4
LOG2_E = 1.4426950408889634


class Tiles(NamedTuple):
    """How a program attends. A row of a tile is a query and a head of the kv head's group."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def tiles_for(num_used: int, head_dim: int, number_bytes: int, by_split: bool) -> Tiles:
    """For that many rows; the fastest on an H200 of those that fit. Only `keys` shows in the bits."""
    keys, is_wide = KEY_TILE[number_bytes], head_dim > 128
    if number_bytes == 4:
        return Tiles(32, keys, 4, 2)
    if by_split:
        rows = max(16, triton.next_power_of_2(num_used))
        return Tiles(rows, keys, 8 if is_wide and rows > 32 else 4, 3)
    return Tiles(128, keys, 8, 2) if is_wide else Tiles(64, keys, 4, 3)


@triton.jit(
    do_not_specialize=["query_stride", "table_width", "num_used", "first_key"],
    do_not_specialize_on_alignment=["p_query", "p_query_start", "p_query_len", "p_context_len", "p_block_table"],
)
def attention_splits_kernel(
    p_query,
    p_key_cache,
    p_value_cache,
    p_query_start,
    p_query_len,
    p_context_len,
    p_block_table,
    p_part,
    p_part_scalars,
    query_stride,
    table_width,
    num_used,
    first_key,
    scale_log2,
    GROUP: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """(m, l, acc) of a row's queries over each split of its keys.

    Grid: (rows, kv heads, splits of the longest row). A program owns one split of a row for one kv head, and does
    nothing past the row's end. Tile row i is head i % GROUP of the kv head's group, of query i // GROUP; num_used are
    kept. Reads queries, caches and tables; writes acc to parts [rows, kv heads, splits, num_used, HEAD_DIM], m and l
    to scalars [rows, kv heads, splits, 2, num_used]. Sums in fp32.
    """
    wait_for_inputs(PDL)
    i_row, i_kv_head, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_queries, context_len = tl.load(p_query_len + i_row), tl.load(p_context_len + i_row)
    first, end = i_split * SPLIT_TOKENS, context_len + num_queries
    p_blocks = p_block_table + i_row.to(tl.int64) * table_width
    b_blocks = load_blocks(p_blocks, first, table_width, KV_BLOCK, SPLIT_BLOCKS)
    if (num_queries > 0) & (first < end):
        o_row, o_dim = tl.arange(0, TILE_ROWS), tl.arange(0, BLOCK_D)
        first_token = tl.load(p_query_start + i_row)
        b_query = load_queries(
            p_query, first_token, num_queries, query_stride, i_kv_head, GROUP, HEAD_DIM, BLOCK_D, TILE_ROWS
        )
        b_position = tl.where(o_row // GROUP < num_queries, context_len + o_row // GROUP, -1)
        b_top, b_total, b_sum = attend_split(
            b_query, b_position, p_key_cache, p_value_cache, b_blocks, i_kv_head,
            first, tl.minimum(first + SPLIT_TOKENS, end), first_key, scale_log2,
            KV_BLOCK, KV_HEADS, HEAD_DIM, BLOCK_D, KEY_TILE, TILE_ROWS,
        )  # fmt: skip
        i_part = (i_row.to(tl.int64) * KV_HEADS + i_kv_head) * tl.num_programs(2) + i_split
        is_used = o_row < num_queries * GROUP
        p_scalars = p_part_scalars + i_part * 2 * num_used + o_row
        tl.store(p_scalars, b_top, mask=is_used)
        tl.store(p_scalars + num_used, b_total, mask=is_used)
        o_part = (i_part * num_used + o_row) * HEAD_DIM
        mask = is_used[:, None] & (o_dim < HEAD_DIM)[None, :]
        tl.store(p_part + o_part[:, None] + o_dim[None, :], b_sum, mask=mask)


@triton.jit(
    do_not_specialize=["num_splits", "num_used"],
    do_not_specialize_on_alignment=["p_query_start", "p_query_len", "p_context_len"],
)
def attention_merge_kernel(
    p_out,
    p_gate,
    p_query_start,
    p_query_len,
    p_context_len,
    p_part,
    p_part_scalars,
    num_splits,
    num_used,
    scale_log2,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = merge of a row's splits, in order, over l; times sigmoid(gate), if GATE_STRIDE is not 0.

    Grid: (rows, kv heads, tiles of MERGE_ROWS of the num_used tile rows). A program owns some (query, head) of a row.
    Reads what `attention_splits_kernel` left, and gates; writes out [tokens, heads, HEAD_DIM]. Sums in fp32.
    """
    wait_for_inputs(PDL)
    i_row, i_kv_head, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_queries = tl.load(p_query_len + i_row)
    if i_tile * MERGE_ROWS < num_queries * GROUP:
        end = tl.load(p_context_len + i_row) + num_queries
        o_row, o_dim = i_tile * MERGE_ROWS + tl.arange(0, MERGE_ROWS), tl.arange(0, BLOCK_D)
        is_used = o_row < num_queries * GROUP
        mask = is_used[:, None] & (o_dim < HEAD_DIM)[None, :]
        first_token = tl.load(p_query_start + i_row)
        if GATE_STRIDE > 0:  # here, so that nothing waits for it behind the splits
            o_gate = head_offsets(first_token, o_row, GATE_STRIDE, i_kv_head, GROUP, HEAD_DIM, BLOCK_D)
            b_gate = tl.load(p_gate + o_gate, mask=mask, other=0.0)
        i_first = (i_row.to(tl.int64) * KV_HEADS + i_kv_head) * num_splits
        b_top = tl.full([MERGE_ROWS], -1e30, tl.float32)
        b_total = tl.zeros([MERGE_ROWS], tl.float32)
        b_sum = tl.zeros([MERGE_ROWS, BLOCK_D], tl.float32)
        for i_split in range(0, tl.cdiv(end, SPLIT_TOKENS)):
            p_scalars = p_part_scalars + (i_first + i_split) * 2 * num_used + o_row
            o_part = ((i_first + i_split) * num_used + o_row) * HEAD_DIM
            b_split_top = tl.load(p_scalars, mask=is_used, other=-1e30)
            b_split_total = tl.load(p_scalars + num_used, mask=is_used, other=0.0)
            b_split_sum = tl.load(p_part + o_part[:, None] + o_dim[None, :], mask=mask, other=0.0)
            b_top, b_total, b_sum = merge(b_top, b_total, b_sum, b_split_top, b_split_total, b_split_sum, scale_log2)
        b_out = normalise(b_total, b_sum).to(p_out.dtype.element_ty)
        if GATE_STRIDE > 0:
            b_out = gated(b_out, b_gate)
        o_out = head_offsets(first_token, o_row, KV_HEADS * GROUP * HEAD_DIM, i_kv_head, GROUP, HEAD_DIM, BLOCK_D)
        tl.store(p_out + o_out, b_out, mask=mask)


@triton.jit(
    do_not_specialize=["query_stride", "table_width", "first_key"],
    do_not_specialize_on_alignment=["p_query", "p_query_start", "p_query_len", "p_context_len", "p_block_table"],
)
def attention_rows_kernel(
    p_out,
    p_gate,
    p_query,
    p_key_cache,
    p_value_cache,
    p_query_start,
    p_query_len,
    p_context_len,
    p_block_table,
    query_stride,
    table_width,
    first_key,
    scale_log2,
    GROUP: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = attention of a tile of queries over all of their keys, split by split; times sigmoid(gate), if any.

    Grid: (rows, kv heads, tiles of TILE_ROWS // GROUP queries of the longest row). A program owns one tile of a row for
    one kv head, and does nothing past the row's queries. Reads queries, caches, tables and gates; writes out
    [tokens, heads, HEAD_DIM]. Sums in fp32.
    """
    wait_for_inputs(PDL)
    i_row, i_kv_head = tl.program_id(0), tl.program_id(1)
    i_tile = tl.num_programs(2) - 1 - tl.program_id(2)  # those with most keys first
    TILE_QUERIES: tl.constexpr = TILE_ROWS // GROUP
    first_query = i_tile * TILE_QUERIES
    num_queries = tl.minimum(tl.load(p_query_len + i_row) - first_query, TILE_QUERIES)
    if num_queries > 0:
        o_row, o_dim = tl.arange(0, TILE_ROWS), tl.arange(0, BLOCK_D)
        first_token = tl.load(p_query_start + i_row) + first_query
        first_position = tl.load(p_context_len + i_row) + first_query
        b_query = load_queries(
            p_query, first_token, num_queries, query_stride, i_kv_head, GROUP, HEAD_DIM, BLOCK_D, TILE_ROWS
        )
        b_position = tl.where(o_row // GROUP < num_queries, first_position + o_row // GROUP, -1)
        p_blocks = p_block_table + i_row.to(tl.int64) * table_width
        end = first_position + num_queries
        b_top = tl.full([TILE_ROWS], -1e30, tl.float32)
        b_total = tl.zeros([TILE_ROWS], tl.float32)
        b_sum = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)
        for first in range(0, end, SPLIT_TOKENS):
            b_blocks = load_blocks(p_blocks, first, table_width, KV_BLOCK, SPLIT_BLOCKS)
            b_split_top, b_split_total, b_split_sum = attend_split(
                b_query, b_position, p_key_cache, p_value_cache, b_blocks, i_kv_head,
                first, tl.minimum(first + SPLIT_TOKENS, end), first_key, scale_log2,
                KV_BLOCK, KV_HEADS, HEAD_DIM, BLOCK_D, KEY_TILE, TILE_ROWS,
            )  # fmt: skip
            b_top, b_total, b_sum = merge(b_top, b_total, b_sum, b_split_top, b_split_total, b_split_sum, scale_log2)
        mask = (o_row // GROUP < num_queries)[:, None] & (o_dim < HEAD_DIM)[None, :]
        b_out = normalise(b_total, b_sum).to(p_out.dtype.element_ty)
        if GATE_STRIDE > 0:
            o_gate = head_offsets(first_token, o_row, GATE_STRIDE, i_kv_head, GROUP, HEAD_DIM, BLOCK_D)
            b_gate = tl.load(p_gate + o_gate, mask=mask, other=0.0)
            b_out = gated(b_out, b_gate)
        o_out = head_offsets(first_token, o_row, KV_HEADS * GROUP * HEAD_DIM, i_kv_head, GROUP, HEAD_DIM, BLOCK_D)
        tl.store(p_out + o_out, b_out, mask=mask)


def launch_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: AttentionRows,
    scale: float,
    gate: torch.Tensor | None = None,
    by_split: bool | None = None,
    split_tokens: int = SPLIT_TOKENS,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`paged_attention_varlen` by its Triton kernels: splits side by side, or one after the other (`by_split`).

    None chooses by what the host knows: side by side when the longest row has few queries. Both give the same bits.
    Tests pass smaller tiles. Nothing is read back and nothing depends on lengths, so that it can be captured.
    """
    num_heads, head_dim = query.shape[1:]
    kv_block_tokens, kv_heads = key_cache.shape[1:3]
    group, num_rows = num_heads // kv_heads, rows.query_len.shape[0]
    num_used, number_bytes = rows.max_query_len * group, query.element_size()
    if by_split is None:
        by_split = num_used <= (tiles.rows if tiles else MOST_SPLIT_ROWS[number_bytes])
    tiles = tiles or tiles_for(num_used, head_dim, number_bytes, by_split)
    out = query.new_empty(query.shape)
    if num_rows == 0 or rows.max_query_len == 0:
        return out
    outputs, gate_stride = ((out, out), 0) if gate is None else ((out, gate), gate.stride(0))
    tables = (rows.query_start, rows.query_len, rows.context_len, rows.block_table)
    table_width, scale_log2 = rows.block_table.stride(0), scale * LOG2_E
    shape = {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "SPLIT_TOKENS": split_tokens,
    }
    most_blocks = triton.cdiv(split_tokens - 1, kv_block_tokens) + 1  # that a split's keys lie in
    attending = {
        "KV_BLOCK": kv_block_tokens,
        "SPLIT_BLOCKS": max(tiles.keys, triton.next_power_of_2(most_blocks)),  # a gather wants as many as it picks
        "KEY_TILE": tiles.keys,
        "TILE_ROWS": tiles.rows,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    if not by_split:
        attention_rows_kernel[(num_rows, kv_heads, triton.cdiv(rows.max_query_len, tiles.rows // group))](
            *outputs, query, key_cache, value_cache, *tables, query.stride(0), table_width, rows.first_key, scale_log2,
            **shape, **attending, GATE_STRIDE=gate_stride, **pdl(query.device),
        )  # fmt: skip
        return out
    num_splits = triton.cdiv(rows.max_context_len, split_tokens)
    part, scalars = split_workspace(num_rows, kv_heads, num_splits, num_used, head_dim, query.device)
    attention_splits_kernel[(num_rows, kv_heads, num_splits)](
        query, key_cache, value_cache, *tables, part, scalars, query.stride(0), table_width, num_used, rows.first_key,
        scale_log2, **shape, **attending, **pdl(query.device),
    )  # fmt: skip
    attention_merge_kernel[(num_rows, kv_heads, triton.cdiv(num_used, MERGE_ROWS))](
        *outputs, *tables[:3], part, scalars, num_splits, num_used, scale_log2,
        **shape, MERGE_ROWS=MERGE_ROWS, GATE_STRIDE=gate_stride, num_warps=4, **pdl(query.device),
    )  # fmt: skip
    return out


def split_workspace(
    num_rows: int, kv_heads: int, num_splits: int, num_used: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for acc and for (m, l) of every split. The allocator hands each layer the same memory, captured or not."""
    part = torch.empty(num_rows, kv_heads, num_splits, num_used, head_dim, dtype=torch.float32, device=device)
    return part, torch.empty(num_rows, kv_heads, num_splits, 2, num_used, dtype=torch.float32, device=device)
