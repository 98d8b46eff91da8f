"""Paged attention on a GPU. A query's bits depend on its position and its keys only.

Keys are walked in tiles, and tiles belong to splits, both at absolute multiples. (m, l, acc) - the largest score, the
sum of weights, the sum of weighted values - start anew in each split, and splits are merged in order: in a second
launch when few queries leave splits to run side by side, else one after the other. Either way by `_attend_split` and
`_merge`, on tiles of one shape. A tile without visible keys multiplies by an exact 1 and adds exact zeros, so it does
not matter what the other queries of a tile see. Rows of a product are independent, and a sum over keys has one order
for every row, because a tile's layout repeats from row to row. A product that meets a sum is either in a `tl.fma` or
the addend of one: nothing is left to contract. Invisible keys and values are 0 on load: what lies in a block past a
row's end (NaN, perhaps) is never computed with.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

SPLIT_TOKENS = 512
TILES = {2: (64, 64), 4: (32, 32)}  # by bytes of a number: rows of a tile (query, head of the kv group), and its keys
WIDE_TILE_ROWS = 128  # of prompts with heads wider than 128, of two bytes: each warp has its own rows, as in 64
MERGE_ROWS = 4
NUM_STAGES = 2  # of the loads of keys and values
LOG2_E = 1.4426950408889634


@triton.jit(
    do_not_specialize=["key_stride", "value_stride"], do_not_specialize_on_alignment=["p_key", "p_value", "p_slot"]
)
def write_kv_kernel(
    p_key_cache,
    p_value_cache,
    p_key,
    p_value,
    p_slot,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """cache[slot[t]] = token t, for keys and values.

    Grid: (tokens, tiles of the WIDTH = kv_heads * head_dim numbers of a token). A program owns one tile of one token;
    a negative slot is skipped. Reads keys, values and slots; writes the caches. Numbers are moved, not computed with.
    """
    wait_for_inputs(PDL)
    i_token, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(p_slot + i_token)
    if slot >= 0:
        o_number = i_tile * BLOCK + tl.arange(0, BLOCK)
        mask = o_number < WIDTH
        b_key = tl.load(p_key + i_token * key_stride + o_number, mask=mask)
        b_value = tl.load(p_value + i_token * value_stride + o_number, mask=mask)
        tl.store(p_key_cache + slot * WIDTH + o_number, b_key, mask=mask)
        tl.store(p_value_cache + slot * WIDTH + o_number, b_value, mask=mask)


@triton.jit
def _attend_split(
    b_query,
    b_position,
    p_key_cache,
    p_value_cache,
    p_blocks,
    i_kv_head,
    first,
    last,
    first_key,
    scale_log2,
    KV_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """(m, l, acc) over keys first .. last-1 for queries at `b_position` (-1: sees nothing). m is of unscaled scores."""
    o_dim = tl.arange(0, BLOCK_D)
    b_top = tl.full([TILE_ROWS], -1e30, tl.float32)  # not -inf: inf - inf is NaN
    b_total = tl.zeros([TILE_ROWS], tl.float32)
    b_sum = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)
    for tile in range(first, last, KEY_TILE):
        o_key = tile + tl.arange(0, KEY_TILE)
        is_there = (o_key >= first_key) & (o_key < last)
        b_block = tl.load(p_blocks + o_key // KV_BLOCK, mask=is_there, other=0).to(tl.int64)
        o_slot = ((b_block * KV_BLOCK + o_key % KV_BLOCK) * KV_HEADS + i_kv_head) * HEAD_DIM
        o_cache = o_slot[:, None] + o_dim[None, :]
        mask = is_there[:, None] & (o_dim < HEAD_DIM)[None, :]
        b_key = tl.load(p_key_cache + o_cache, mask=mask, other=0.0)
        b_score = tl.dot(b_query, tl.trans(b_key), input_precision="ieee")
        is_visible = is_there[None, :] & (o_key[None, :] <= b_position[:, None])
        b_score = tl.where(is_visible, b_score, float("-inf"))
        b_new_top = tl.maximum(b_top, tl.max(b_score, 1))
        b_share = tl.exp2((b_top - b_new_top) * scale_log2)
        b_weight = tl.exp2(tl.fma(b_score, scale_log2, -(b_new_top * scale_log2)[:, None]))
        b_total = tl.fma(b_total, b_share, tl.sum(b_weight, 1))
        b_value = tl.load(p_value_cache + o_cache, mask=mask, other=0.0)
        b_sum = tl.dot(b_weight.to(b_value.dtype), b_value, b_sum * b_share[:, None], input_precision="ieee")
        b_top = b_new_top
    return b_top, b_total, b_sum


@triton.jit
def _merge(b_top, b_total, b_sum, b_split_top, b_split_total, b_split_sum, scale_log2):
    """(m, l, acc) of the splits so far, and of the next one with them."""
    b_new_top = tl.maximum(b_top, b_split_top)
    b_share = tl.exp2((b_top - b_new_top) * scale_log2)
    b_split_share = tl.exp2((b_split_top - b_new_top) * scale_log2)
    b_total = tl.fma(b_total, b_share, b_split_total * b_split_share)
    b_sum = tl.fma(b_sum, b_share[:, None], b_split_sum * b_split_share[:, None])
    return b_new_top, b_total, b_sum


@triton.jit
def _normalise(b_total, b_sum):
    """acc / l, or 0 where no key was visible. Adding 0 makes every zero a positive one."""
    b_divisor = tl.where(b_total == 0.0, 1.0, b_total)
    return tl.div_rn(b_sum, tl.broadcast_to(b_divisor[:, None], b_sum.shape)) + 0.0


@triton.jit
def _load_queries(
    p_query,
    first_token,
    num_queries,
    query_stride,
    i_kv_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """[TILE_ROWS, BLOCK_D], row i: head i % GROUP of the kv head's group, of query i // GROUP; 0 past the last one."""
    o_row, o_dim = tl.arange(0, TILE_ROWS), tl.arange(0, BLOCK_D)
    o_query = (first_token + o_row // GROUP).to(tl.int64) * query_stride
    o_query += (i_kv_head * GROUP + o_row % GROUP) * HEAD_DIM
    mask = (o_row // GROUP < num_queries)[:, None] & (o_dim < HEAD_DIM)[None, :]
    return tl.load(p_query + o_query[:, None] + o_dim[None, :], mask=mask, other=0.0)


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
    if (num_queries > 0) & (first < end):
        o_row, o_dim = tl.arange(0, TILE_ROWS), tl.arange(0, BLOCK_D)
        first_token = tl.load(p_query_start + i_row)
        b_query = _load_queries(
            p_query, first_token, num_queries, query_stride, i_kv_head, GROUP, HEAD_DIM, BLOCK_D, TILE_ROWS
        )
        b_position = tl.where(o_row // GROUP < num_queries, context_len + o_row // GROUP, -1)
        p_blocks = p_block_table + i_row.to(tl.int64) * table_width
        b_top, b_total, b_sum = _attend_split(
            b_query, b_position, p_key_cache, p_value_cache, p_blocks, i_kv_head,
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
    PDL: tl.constexpr,
):
    """out = merge of a row's splits, in order, over l.

    Grid: (rows, kv heads, tiles of MERGE_ROWS of the num_used tile rows). A program owns some (query, head) of a row.
    Reads what `attention_splits_kernel` left; writes out [tokens, heads, HEAD_DIM]. Sums in fp32.
    """
    wait_for_inputs(PDL)
    i_row, i_kv_head, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_queries = tl.load(p_query_len + i_row)
    if i_tile * MERGE_ROWS < num_queries * GROUP:
        end = tl.load(p_context_len + i_row) + num_queries
        o_row, o_dim = i_tile * MERGE_ROWS + tl.arange(0, MERGE_ROWS), tl.arange(0, BLOCK_D)
        is_used = o_row < num_queries * GROUP
        mask = is_used[:, None] & (o_dim < HEAD_DIM)[None, :]
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
            b_top, b_total, b_sum = _merge(b_top, b_total, b_sum, b_split_top, b_split_total, b_split_sum, scale_log2)
        o_out = (tl.load(p_query_start + i_row) + o_row // GROUP).to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM)
        o_out += (i_kv_head * GROUP + o_row % GROUP) * HEAD_DIM
        b_out = _normalise(b_total, b_sum)
        tl.store(p_out + o_out[:, None] + o_dim[None, :], b_out.to(p_out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["query_stride", "table_width", "first_key"],
    do_not_specialize_on_alignment=["p_query", "p_query_start", "p_query_len", "p_context_len", "p_block_table"],
)
def attention_rows_kernel(
    p_out,
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
    PDL: tl.constexpr,
):
    """out = attention of a tile of queries over all of their keys, split by split.

    Grid: (rows, kv heads, tiles of TILE_ROWS // GROUP queries of the longest row). A program owns one tile of a row for
    one kv head, and does nothing past the row's queries. Reads queries, caches and tables; writes out
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
        b_query = _load_queries(
            p_query, first_token, num_queries, query_stride, i_kv_head, GROUP, HEAD_DIM, BLOCK_D, TILE_ROWS
        )
        b_position = tl.where(o_row // GROUP < num_queries, first_position + o_row // GROUP, -1)
        p_blocks = p_block_table + i_row.to(tl.int64) * table_width
        end = first_position + num_queries
        b_top = tl.full([TILE_ROWS], -1e30, tl.float32)
        b_total = tl.zeros([TILE_ROWS], tl.float32)
        b_sum = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)
        for first in range(0, end, SPLIT_TOKENS):
            b_split_top, b_split_total, b_split_sum = _attend_split(
                b_query, b_position, p_key_cache, p_value_cache, p_blocks, i_kv_head,
                first, tl.minimum(first + SPLIT_TOKENS, end), first_key, scale_log2,
                KV_BLOCK, KV_HEADS, HEAD_DIM, BLOCK_D, KEY_TILE, TILE_ROWS,
            )  # fmt: skip
            b_top, b_total, b_sum = _merge(b_top, b_total, b_sum, b_split_top, b_split_total, b_split_sum, scale_log2)
        o_out = (first_token + o_row // GROUP).to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM)
        o_out += (i_kv_head * GROUP + o_row % GROUP) * HEAD_DIM
        mask = (o_row // GROUP < num_queries)[:, None] & (o_dim < HEAD_DIM)[None, :]
        b_out = _normalise(b_total, b_sum)
        tl.store(p_out + o_out[:, None] + o_dim[None, :], b_out.to(p_out.dtype.element_ty), mask=mask)


def launch_write(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`write_kv_varlen` by its Triton kernel."""
    width = key.shape[1] * key.shape[2]
    block = min(1024, triton.next_power_of_2(width))
    write_kv_kernel[(key.shape[0], triton.cdiv(width, block))](
        key_cache, value_cache, key, value, slot_mapping, key.stride(0), value.stride(0), width, block,
        num_warps=4, **pdl(key.device),
    )  # fmt: skip


def launch_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: AttentionRows,
    scale: float,
    by_split: bool | None = None,
    split_tokens: int = SPLIT_TOKENS,
    tile: tuple[int, int] | None = None,
) -> torch.Tensor:
    """`paged_attention_varlen` by its Triton kernels: splits side by side, or one after the other (`by_split`).

    None chooses by what the host knows: side by side when the longest row's queries fit in one tile. Both give the same
    bits. Tests pass smaller tiles. Nothing is read back and nothing depends on lengths, so that it can be captured.
    """
    tile_rows, key_tile = tile or TILES[query.element_size()]
    num_heads, head_dim = query.shape[1:]
    kv_block_tokens, kv_heads = key_cache.shape[1:3]
    group, num_rows = num_heads // kv_heads, rows.query_len.shape[0]
    num_used = rows.max_query_len * group
    if by_split is None:
        by_split = num_used <= tile_rows
    out = query.new_empty(query.shape)
    if num_rows == 0 or rows.max_query_len == 0:
        return out
    tables = (rows.query_start, rows.query_len, rows.context_len, rows.block_table)
    table_width, scale_log2 = rows.block_table.stride(0), scale * LOG2_E
    shape = {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "SPLIT_TOKENS": split_tokens,
    }
    tiles = {"KV_BLOCK": kv_block_tokens, "KEY_TILE": key_tile, "TILE_ROWS": tile_rows, "num_stages": NUM_STAGES}
    tiles["num_warps"] = num_warps(head_dim, query.element_size())
    if not by_split:
        if tile is None and head_dim > 128 and query.element_size() == 2:
            tile_rows = tiles["TILE_ROWS"] = WIDE_TILE_ROWS
        attention_rows_kernel[(num_rows, kv_heads, triton.cdiv(rows.max_query_len, tile_rows // group))](
            out, query, key_cache, value_cache, *tables, query.stride(0), table_width, rows.first_key, scale_log2,
            **shape, **tiles, **pdl(query.device),
        )  # fmt: skip
        return out
    num_splits = triton.cdiv(rows.max_context_len, split_tokens)
    part, scalars = split_workspace(num_rows, kv_heads, num_splits, num_used, head_dim, query.device)
    attention_splits_kernel[(num_rows, kv_heads, num_splits)](
        query, key_cache, value_cache, *tables, part, scalars, query.stride(0), table_width, num_used, rows.first_key,
        scale_log2, **shape, **tiles, **pdl(query.device),
    )  # fmt: skip
    attention_merge_kernel[(num_rows, kv_heads, triton.cdiv(num_used, MERGE_ROWS))](
        out, *tables[:3], part, scalars, num_splits, num_used, scale_log2,
        **shape, MERGE_ROWS=MERGE_ROWS, num_warps=4, **pdl(query.device),
    )  # fmt: skip
    return out


def num_warps(head_dim: int, number_bytes: int) -> int:
    """Of a program that attends: the sums of wide heads need the registers of more. From the shape of a head alone."""
    return 8 if head_dim > 128 and number_bytes == 2 else 4


def split_workspace(
    num_rows: int, kv_heads: int, num_splits: int, num_used: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for acc and for (m, l) of every split. The allocator hands each layer the same memory, captured or not."""
    part = torch.empty(num_rows, kv_heads, num_splits, num_used, head_dim, dtype=torch.float32, device=device)
    return part, torch.empty(num_rows, kv_heads, num_splits, 2, num_used, dtype=torch.float32, device=device)
