"""Causal attention over a paged KV cache, and the write of new keys and values into it.

Formula: o_i = sum_j softmax_j(q_i . k_j * scale) v_j over the visible keys j, in fp32.

A query's bits depend on its position and its keys only. Keys are walked in tiles, and tiles belong to splits, both at
absolute multiples. (m, l, acc) - the largest score, the sum of weights, the sum of weighted values - start anew in
each split, and splits are merged in order: in a second launch when few queries leave splits to run side by side, else
one after the other. Either way by `_attend_split` and `_merge`, on tiles of one shape. A tile without visible keys
multiplies by an exact 1 and adds exact zeros, so it does not matter what the other queries of a tile see. Rows of a
product are independent, and a sum over keys has one order for every row, because a tile's layout repeats from row to
row. A product that meets a sum is either in a `tl.fma` or the addend of one: nothing is left to contract. Invisible
keys and values are 0 on load: what lies in a block past a row's end (NaN, perhaps) is never computed with.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from mambalign.kernels.attention_rows import AttentionRows

SPLIT_TOKENS = 512
TILES = {2: (64, 64), 4: (32, 32)}  # by bytes of a number: rows of a tile (query, head of the kv group), and its keys
MERGE_ROWS = 4
LOG2_E = 1.4426950408889634
CPU_DTYPES = (torch.float32, torch.bfloat16)


def write_kv_varlen(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Put key and value [T, kv_heads, head_dim] at slots of the caches [blocks, kv_block_tokens, kv_heads, head_dim].

    slot_mapping: int64 [T], block id * kv_block_tokens + offset; a token with a negative slot is not written. Tokens
    of key and value may lie apart (views), heads of a token not. Raises ValueError for layouts that do not fit.
    """
    _check(key_cache, value_cache, key, value)
    if key.is_cuda:
        launch_write(key_cache, value_cache, key, value, slot_mapping)
    elif key.dtype in CPU_DTYPES:
        from mambalign.kernels.cpu import attention as cpu

        cpu.write_kv(key_cache, value_cache, key, value, slot_mapping)
    else:
        write_kv_varlen_reference(key_cache, value_cache, key, value, slot_mapping)


def write_kv_varlen_reference(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`write_kv_varlen`, token by token."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache.view(-1, *key.shape[1:])[slot] = key[token]
            value_cache.view(-1, *value.shape[1:])[slot] = value[token]


def paged_attention_varlen(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """Attend from query [T, heads, head_dim] to the caches [blocks, kv_block_tokens, kv_heads, head_dim].

    The rows' own keys must be in the cache already. Query head h uses key head h // (heads / kv_heads). Returns
    [T, heads, head_dim], contiguous, in the dtype of query: 0 for a query without visible keys, anything for a token
    of no row. Tokens of query may lie apart (a view). Raises ValueError for layouts that do not fit.
    """
    _check(key_cache, value_cache, query)
    num_heads, kv_heads = query.shape[1], key_cache.shape[2]
    if num_heads % kv_heads or num_heads > 32 * kv_heads or scale <= 0:
        raise ValueError(f"attention of {num_heads} heads over {kv_heads} kv heads, scale {scale}")
    if query.is_cuda:
        return launch_attention(query, key_cache, value_cache, rows, scale)
    if query.dtype in CPU_DTYPES:
        from mambalign.kernels.cpu import attention as cpu

        return cpu.paged_attention(query, key_cache, value_cache, rows, scale)
    return paged_attention_varlen_reference(query, key_cache, value_cache, rows, scale)


def paged_attention_varlen_reference(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """`paged_attention_varlen`, row by row in fp64."""
    kv_block_tokens, kv_heads = key_cache.shape[1:3]
    out = query.new_zeros(query.shape)
    for row, (start, query_len) in enumerate(zip(rows.query_start.tolist(), rows.query_len.tolist(), strict=True)):
        context_len = int(rows.context_len[row])
        if query_len == 0 or context_len + query_len <= rows.first_key:
            continue
        key_position = torch.arange(rows.first_key, context_len + query_len, device=query.device)
        blocks = rows.block_table[row, key_position // kv_block_tokens].long()
        slots = blocks * kv_block_tokens + key_position % kv_block_tokens
        keys, values = (
            cache.view(-1, *cache.shape[2:])[slots].double().repeat_interleave(query.shape[1] // kv_heads, 1)
            for cache in (key_cache, value_cache)
        )
        query_position = context_len + torch.arange(query_len, device=query.device)
        scores = torch.einsum("qhd,khd->hqk", query[start : start + query_len].double(), keys) * scale
        scores = scores.masked_fill(key_position > query_position[:, None], -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        out[start : start + query_len] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out


def _check(key_cache: torch.Tensor, value_cache: torch.Tensor, *tokens: torch.Tensor) -> None:
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and key_cache.shape == value_cache.shape):
        raise ValueError("attention wants contiguous key and value caches of one shape")
    for each in tokens:
        if each.shape[2] != key_cache.shape[3] or each.dtype != key_cache.dtype or not each[:1].is_contiguous():
            raise ValueError(
                f"tokens {tuple(each.shape)}, strides {each.stride()}, {each.dtype}, for a cache of "
                f"{tuple(key_cache.shape)}, {key_cache.dtype}"
            )


@triton.jit(do_not_specialize=["key_stride", "value_stride"], do_not_specialize_on_alignment=["p_key", "p_value"])
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
):
    """cache[slot[t]] = token t, for keys and values.

    Grid: (tokens, tiles of the WIDTH = kv_heads * head_dim numbers of a token). A program owns one tile of one token;
    a negative slot is skipped. Reads keys, values and slots; writes the caches. Numbers are moved, not computed with.
    """
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
):
    """(m, l, acc) of a row's queries over each split of its keys.

    Grid: (rows, kv heads, splits of the longest row). A program owns one split of a row for one kv head, and does
    nothing past the row's end. Tile row i is head i % GROUP of the kv head's group, of query i // GROUP; num_used are
    kept. Reads queries, caches and tables; writes acc to parts [rows, kv heads, splits, num_used, HEAD_DIM], m and l
    to scalars [rows, kv heads, splits, 2, num_used]. Sums in fp32.
    """
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
):
    """out = merge of a row's splits, in order, over l.

    Grid: (rows, kv heads, tiles of MERGE_ROWS of the num_used tile rows). A program owns some (query, head) of a row.
    Reads what `attention_splits_kernel` left; writes out [tokens, heads, HEAD_DIM]. Sums in fp32.
    """
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
):
    """out = attention of a tile of queries over all of their keys, split by split.

    Grid: (rows, kv heads, tiles of TILE_ROWS // GROUP queries of the longest row). A program owns one tile of a row for
    one kv head, and does nothing past the row's queries. Reads queries, caches and tables; writes out
    [tokens, heads, HEAD_DIM]. Sums in fp32.
    """
    i_row, i_kv_head, i_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
        key_cache, value_cache, key, value, slot_mapping, key.stride(0), value.stride(0), width, block, num_warps=4
    )


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
    tiles = {"KV_BLOCK": kv_block_tokens, "KEY_TILE": key_tile, "TILE_ROWS": tile_rows, "num_warps": 4, "num_stages": 2}
    if not by_split:
        attention_rows_kernel[(num_rows, kv_heads, triton.cdiv(rows.max_query_len, tile_rows // group))](
            out, query, key_cache, value_cache, *tables, query.stride(0), table_width, rows.first_key, scale_log2,
            **shape, **tiles,
        )  # fmt: skip
        return out
    num_splits = triton.cdiv(rows.max_context_len, split_tokens)
    part, scalars = split_workspace(num_rows, kv_heads, num_splits, num_used, head_dim, query.device)
    attention_splits_kernel[(num_rows, kv_heads, num_splits)](
        query, key_cache, value_cache, *tables, part, scalars, query.stride(0), table_width, num_used, rows.first_key,
        scale_log2, **shape, **tiles,
    )  # fmt: skip
    attention_merge_kernel[(num_rows, kv_heads, triton.cdiv(num_used, MERGE_ROWS))](
        out, *tables[:3], part, scalars, num_splits, num_used, scale_log2,
        **shape, MERGE_ROWS=MERGE_ROWS, num_warps=4,
    )  # fmt: skip
    return out


def split_workspace(
    num_rows: int, kv_heads: int, num_splits: int, num_used: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for acc and for (m, l) of every split. The allocator hands each layer the same memory, captured or not."""
    part = torch.empty(num_rows, kv_heads, num_splits, num_used, head_dim, dtype=torch.float32, device=device)
    return part, torch.empty(num_rows, kv_heads, num_splits, 2, num_used, dtype=torch.float32, device=device)


KV_TILE = 128
SHORT_QUERY = 16  # rows with at most this many queries run together, padded to one length
QUERY_BLOCK = 256  # longer rows are run by blocks of this many queries
LOWEST = -1e30  # stands for -inf where inf - inf would be NaN


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Put key, value [T, kv_heads, head_dim] at slots (block id * kv_block_tokens + offset) [T] of the caches."""
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slot_mapping, value)


@dataclass(frozen=True)
class AttentionGroup:
    """Rows that run together: R rows of Q queries each (padded), over the same number of key tiles.

    Keys before `first_hidden_key` (a multiple of KV_TILE) are seen by every query of the group, but for the first
    `first_key` of all.
    """

    shape: tuple[int, int, int]  # R, Q, tiles
    query_index: torch.Tensor | None  # [R * Q] token of each query, padding repeats the row's last; None: all, in order
    output_place: torch.Tensor | None  # [.] places in [R * Q] that are no padding; None: all
    output_token: torch.Tensor | None  # [.] the tokens that stand there
    kv_index: torch.Tensor  # [R * kv_heads * tiles * KV_TILE] rows of the caches seen as [.., head_dim]
    first_key: int
    first_hidden_key: int
    hidden_scores: torch.Tensor  # [R, 1, tiles from first_hidden_key, Q, 1, KV_TILE] bool, keys a query must not see
    hidden_values: torch.Tensor  # [R, 1, keys from first_hidden_key, 1] bool, keys no query of the row may see


def plan_attention(batch, kv_block_tokens: int, kv_heads: int) -> list[AttentionGroup]:
    """Group the rows of an `AttentionBatch`; the result serves every attention layer of the pass."""
    pieces = list(_pieces(batch.query_lens, batch.context_lens))
    return [_group(batch, *piece, kv_block_tokens, kv_heads, len(pieces) == 1) for piece in pieces]


def _pieces(query_lens: list[int], context_lens: list[int]) -> Iterator[tuple[list[int], int, int]]:
    """(rows, first query, queries): short rows of similar key counts together, long rows alone and by blocks."""
    short: dict[int, list[int]] = {}
    for row, query_len in enumerate(query_lens):
        if query_len <= SHORT_QUERY:
            num_tiles = -(-(context_lens[row] + query_len) // KV_TILE)
            short.setdefault(num_tiles.bit_length(), []).append(row)
            continue
        for first in range(0, query_len, QUERY_BLOCK):
            yield [row], first, min(QUERY_BLOCK, query_len - first)
    for rows in short.values():
        yield rows, 0, max(query_lens[row] for row in rows)


def _group(
    batch, rows: list[int], first: int, num_queries: int, kv_block_tokens: int, kv_heads: int, is_only: bool
) -> AttentionGroup:
    device = batch.block_table.device
    starts, total = [], 0
    for query_len in batch.query_lens:
        starts.append(total)
        total += query_len
    lengths = [min(num_queries, batch.query_lens[row] - first) for row in rows]
    contexts = [batch.context_lens[row] + first for row in rows]
    num_keys = [context + length for context, length in zip(contexts, lengths, strict=True)]
    num_tiles = -(-max(num_keys) // KV_TILE)

    # Queries of padding repeat the row's last one, so that they compute with nothing undefined.
    is_padded = min(lengths) < num_queries
    offset = torch.arange(num_queries, device=device).expand(len(rows), -1)
    lengths_column = torch.tensor(lengths, device=device)[:, None]
    query_index = output_place = None
    if is_padded:
        output_place = (offset < lengths_column).flatten().nonzero().squeeze(1)
        offset = offset.minimum(lengths_column - 1)
    if is_padded or not is_only:
        query_index = (torch.tensor([starts[row] + first for row in rows], device=device)[:, None] + offset).flatten()
    output_token = query_index if output_place is None else query_index[output_place]

    first_hidden_key = min(contexts) // KV_TILE * KV_TILE
    key_position = torch.arange(num_tiles * KV_TILE, device=device)
    late = key_position[first_hidden_key:]
    query_position = torch.tensor(contexts, device=device)[:, None] + offset
    hidden_scores = (late > query_position[..., None]).view(len(rows), num_queries, -1, KV_TILE).transpose(1, 2)
    hidden_values = late >= torch.tensor(num_keys, device=device)[:, None]

    block_of_key = (key_position // kv_block_tokens).clamp_(max=batch.block_table.shape[1] - 1)
    table = batch.block_table if len(rows) == len(batch.query_lens) else batch.block_table[rows]
    slots = table.long()[:, block_of_key] * kv_block_tokens + key_position % kv_block_tokens
    kv_index = slots[:, None] * kv_heads + torch.arange(kv_heads, device=device)[:, None]
    return AttentionGroup(
        (len(rows), num_queries, num_tiles),
        query_index,
        output_place,
        output_token,
        kv_index.flatten(),
        batch.first_key,
        first_hidden_key,
        hidden_scores[:, None, :, :, None],
        hidden_values[:, None, :, None],
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: list[AttentionGroup],
    scale: float,
) -> torch.Tensor:
    """Attend from query [T, heads, head_dim] to the caches [blocks, kv_block_tokens, kv_heads, head_dim].

    The batch's own keys must be in the cache already (`write_kv`). Query head h uses key head h // (heads / kv_heads).
    Returns [T, heads, head_dim] in the dtype of query. A query without visible keys gives 0.
    """
    out = query.new_empty(query.shape)
    for group in plan:
        queries = query if group.query_index is None else query.index_select(0, group.query_index)
        result = _attend(queries.float() * scale, key_cache, value_cache, group).to(out.dtype)
        if group.output_place is not None:
            result = result.index_select(0, group.output_place)
        if group.output_token is None:
            return result
        out.index_copy_(0, group.output_token, result)
    return out


def _attend(query, key_cache, value_cache, group: AttentionGroup) -> torch.Tensor:
    """Scaled query [R * Q, heads, head_dim] -> [R * Q, heads, head_dim], fp32. All heads and tiles are one batch."""
    num_rows, num_queries, num_tiles = group.shape
    num_heads, head_dim = query.shape[1:]
    kv_heads = key_cache.shape[2]
    keys = key_cache.view(-1, head_dim).index_select(0, group.kv_index).float()
    values = value_cache.view(-1, head_dim).index_select(0, group.kv_index).float()
    by_row = values.view(num_rows, kv_heads, -1, head_dim)
    by_row[:, :, group.first_hidden_key :].masked_fill_(group.hidden_values, 0.0)
    if group.first_key:
        by_row[:, :, : group.first_key] = 0.0
    keys, values = keys.view(-1, KV_TILE, head_dim), values.view(-1, KV_TILE, head_dim)

    # One product row per (query, head of the kv group); rows of padding are zeros and are dropped at the end.
    used = num_queries * (num_heads // kv_heads)
    used_and_padding = max(used, min_query_rows(head_dim, query.device))
    q = query.view(num_rows, num_queries, kv_heads, -1, head_dim).transpose(1, 2).reshape(num_rows, kv_heads, used, -1)
    if used_and_padding > used:
        q = torch.nn.functional.pad(q, (0, 0, 0, used_and_padding - used))
    q = q.unsqueeze(2).expand(-1, -1, num_tiles, -1, -1).reshape(-1, used_and_padding, head_dim)

    scores = torch.bmm(q, keys.transpose(1, 2))
    by_query = scores.view(num_rows, kv_heads, num_tiles, used_and_padding, KV_TILE)[:, :, :, :used]
    by_query = by_query.unflatten(3, (num_queries, -1))
    by_query[:, :, group.first_hidden_key // KV_TILE :].masked_fill_(group.hidden_scores, float("-inf"))
    if group.first_key:
        by_query[:, :, 0, :, :, : group.first_key] = float("-inf")
    top = scores.amax(-1, keepdim=True).clamp_(min=LOWEST)
    weights = scores.sub_(top).exp_()
    parts = (top, weights.sum(-1, keepdim=True), torch.bmm(weights, values))
    merged = _merge_tiles(*(part.view(num_rows * kv_heads, num_tiles, used_and_padding, -1) for part in parts))
    merged = merged[:, :used].reshape(num_rows, kv_heads, num_queries, -1, head_dim)
    return merged.transpose(1, 2).reshape(-1, num_heads, head_dim)


def _merge_tiles(top: torch.Tensor, total: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
    """Merge [B, tiles, M, 1], [B, tiles, M, 1], [B, tiles, M, D] over tiles, in order: [B, M, D]."""
    share = (top - top.amax(1, keepdim=True)).exp_()
    denominator = total[:, 0] * share[:, 0]
    numerator = partial[:, 0] * share[:, 0]
    for tile in range(1, top.shape[1]):
        denominator.addcmul_(total[:, tile], share[:, tile])
        numerator.addcmul_(partial[:, tile], share[:, tile])
    return numerator.div_(denominator).masked_fill_(denominator == 0, 0.0)


@lru_cache
def min_query_rows(head_dim: int, device: torch.device) -> int:
    """Fewest query rows for which both products give a row the same bits as among many rows; tried, not assumed."""
    generator = torch.Generator().manual_seed(head_dim)

    def spread(*shape: int) -> torch.Tensor:
        exponents = torch.randint(-12, 13, shape, generator=generator)
        return torch.randn(shape, generator=generator).ldexp(exponents)

    half = head_dim // 2
    q, keys, values = spread(3, 96, head_dim), spread(3, KV_TILE, head_dim), spread(3, KV_TILE, head_dim)
    q[..., half : 2 * half] = -q[..., :half] * (1 + 1e-3 * torch.rand(half, generator=generator))
    keys[..., half : 2 * half] = keys[..., :half]
    weights = spread(3, 96, KV_TILE)
    q, keys, values, weights = (t.to(device) for t in (q, keys, values, weights))
    scores, outputs = torch.bmm(q, keys.transpose(1, 2)), torch.bmm(weights, values)

    def same(batch: int, rows: int, first: int) -> bool:
        part = slice(first, first + rows)
        some_scores = torch.bmm(q[:batch, part].contiguous(), keys[:batch].transpose(1, 2))
        some_outputs = torch.bmm(weights[:batch, part].contiguous(), values[:batch])
        return torch.equal(some_scores, scores[:batch, part]) and torch.equal(some_outputs, outputs[:batch, part])

    for least in (2, 4, 8, 12, 16, 24, 32, 48):
        if all(
            same(batch, rows, first) for batch in (1, 2, 3) for rows in range(least, 65) for first in (0, 5, 96 - rows)
        ):
            return least
    raise RuntimeError(f"attention with head_dim {head_dim}: no number of query rows is batch-invariant on {device}")
