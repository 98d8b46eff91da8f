"""Paged attention on a CPU: compiled loops over (row, kv head, block of queries), straight from the paged cache.

Formula: o_i = sum_j 2^(s_ij - m_i) v_j / sum_j 2^(s_ij - m_i), s_ij = q_i . k_j * scale * log2(e), in fp32.

Keys are walked in tiles of `KV_TILE` tokens at absolute multiples, with an online softmax. Every sum has one order:
dot products go by ascending dimension and weighted values by ascending key, each step one fused multiply-add; the sum
of a tile's weights always has `KV_TILE` terms. Vectors run across keys or dimensions, never along a sum, so neither
their width nor the number of rows that share a tile can change a bit: a query's result depends on its position and
its keys only, not on the batch, the cut of a prefill, or the number of threads. Invisible keys and values are zeros
on load, and their weight is an exact 0.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numba import njit

from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.cpu.vectors import (
    COLUMNS,
    PRODUCT_ROWS,
    add_product,
    bits_as_float,
    float_as_bits,
    fma,
    max_64,
    sum_64,
    transpose,
    widen_row,
)

KV_TILE = 64
ITEM_ROWS = 64  # (query, head) rows of one item of work: they share the load of a tile
LOWEST = np.float32(-1e30)  # stands for -inf where inf - inf would be NaN
LOG2_E = math.log2(math.e)
PARALLEL_WORK = 1 << 24  # multiply-adds below which one thread is faster than several
UNSIGNED = {torch.float32: (torch.int32, np.uint32, 0), torch.bfloat16: (torch.int16, np.uint16, 16)}

# 2^x = 1 + x (c1 + x (c2 + ...)) on [-0.5, 0.5], off by 2e-9 of the value at most (least maximum of that)
C1, C2, C3, C4, C5, C6 = (
    np.float32(c)
    for c in (
        0.6931472028552111,
        0.24022647913615575,
        0.055503324707838836,
        0.009618437358252418,
        0.0013398874556965815,
        0.00015353362055868996,
    )
)
ROUND = np.float32(1.5 * 2**23)  # added and subtracted: rounds to an integer, which the low bits hold in between
LEAST_EXPONENT = np.float32(-126.0)  # below it 2^x is taken as 0


@njit(inline="always")
def _exp2(x):
    """2^x for x <= 0, fp32, within 2 ulp; 0 below 2^-126. No branch, so that a loop over it is vectorised."""
    shifted = x + ROUND
    fraction = x - (shifted - ROUND)
    power = bits_as_float(np.int32((float_as_bits(shifted) + 127) << 23))
    y = fma(fraction, C6, C5)
    y = fma(fraction, y, C4)
    y = fma(fraction, y, C3)
    y = fma(fraction, y, C2)
    y = fma(fraction, y, C1)
    y = fma(fraction, y, np.float32(1.0)) * power
    return np.float32(0.0) if x < LEAST_EXPONENT else y


@njit(cache=True, nogil=True, error_model="numpy")
def _load_tile(cache_bits, shift, block_table, row, kv_head, first, low, high, tile):
    """Tokens low..high-1 of the tile that starts at token `first`, as fp32 [KV_TILE, D]; zeros elsewhere."""
    _, block_tokens, kv_heads, head_dim = cache_bits.shape
    flat = cache_bits.reshape(-1)
    column, offset = first // block_tokens, first % block_tokens
    for j in range(KV_TILE):
        if low <= first + j < high:
            slot = np.int64(block_table[row, column]) * block_tokens + offset
            widen_row(flat, (slot * kv_heads + kv_head) * head_dim, shift, tile, j, head_dim)
        else:
            tile[j] = 0.0
        offset += 1
        if offset == block_tokens:
            column, offset = column + 1, 0


@njit(inline="always")
def _weigh(weights, i, low, high, top, total, sums):
    """Turn the scores of a tile, weights[i], into weights: 0 outside low .. high-1. Rescale what came before."""
    for j in range(0, low):
        weights[i, j] = -np.inf
    for j in range(max(high, 0), KV_TILE):
        weights[i, j] = -np.inf
    new_top = max(top[i], max_64(weights, i))
    for j in range(KV_TILE):
        weights[i, j] = _exp2(weights[i, j] - new_top)
    if new_top > top[i]:
        share = _exp2(top[i] - new_top)
        total[i] *= share
        for d in range(sums.shape[1]):
            sums[i, d] *= share
        top[i] = new_top
    total[i] += sum_64(weights, i)


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_item(queries, num_rows, group, first_position, key_bits, value_bits, shift, place, first_key):
    """Weighted sums of values, and sums of weights, for `num_rows` rows (query, head) of one kv head.

    queries [., D]: row i is query i // group, from `first_position` on. place: block table, row, kv head.
    """
    num_visible = first_position + num_rows // group  # to the last query
    num_padded = -(-num_rows // PRODUCT_ROWS) * PRODUCT_ROWS
    width = queries.shape[1]
    keys = np.empty((width, KV_TILE), np.float32)
    values = np.zeros((KV_TILE, width), np.float32)
    weights = np.empty((num_padded, KV_TILE), np.float32)
    sums = np.zeros((num_padded, width), np.float32)
    top, total = np.full(num_rows, LOWEST), np.zeros(num_rows, np.float32)
    for first in range(first_key // KV_TILE * KV_TILE, num_visible, KV_TILE):
        _load_tile(key_bits, shift, *place, first, first_key, num_visible, values)
        transpose(values, keys, KV_TILE, width)
        _load_tile(value_bits, shift, *place, first, first_key, num_visible, values)
        weights[:] = 0.0
        add_product(queries, keys, weights, num_padded, KV_TILE, key_bits.shape[3])
        for i in range(num_rows):
            _weigh(weights, i, first_key - first, first_position + i // group + 1 - first, top, total, sums)
        add_product(weights, values, sums, num_padded, width, min(KV_TILE, num_visible - first))
    return sums, total


@njit(cache=True, nogil=True, error_model="numpy")
def _attend(
    query, key_bits, value_bits, shift, query_start, query_len, context_len, block_table, first_key, scale,
    worker, num_workers, out,
):  # fmt: skip
    """Every `num_workers`-th item, from item `worker` on. query, out [T, heads, D] fp32; caches as unsigned bits."""
    num_heads, head_dim = query.shape[1:]
    kv_heads = key_bits.shape[2]
    group = num_heads // kv_heads
    item_queries = max(1, ITEM_ROWS // group)
    room = -(-item_queries * group // PRODUCT_ROWS) * PRODUCT_ROWS
    queries = np.zeros((room, -(-head_dim // COLUMNS) * COLUMNS), np.float32)
    item = -1
    for row in range(len(query_len)):
        for first in range(0, query_len[row], item_queries):
            num_rows = min(item_queries, query_len[row] - first) * group
            for kv_head in range(kv_heads):
                item += 1
                if item % num_workers != worker:
                    continue
                first_token, first_head = query_start[row] + first, kv_head * group
                for i in range(num_rows):
                    for d in range(head_dim):
                        queries[i, d] = query[first_token + i // group, first_head + i % group, d] * scale
                place = (block_table, row, kv_head)
                sums, total = _attend_item(
                    queries, num_rows, group, context_len[row] + first, key_bits, value_bits, shift, place, first_key
                )
                for i in range(num_rows):
                    # A total of 0 is a query without keys. Adding 0 makes every zero a positive one.
                    divisor = total[i] if total[i] != 0 else np.float32(1.0)
                    for d in range(head_dim):
                        value = sums[i, d] / divisor + np.float32(0.0)
                        out[first_token + i // group, first_head + i % group, d] = value


@njit(cache=True, nogil=True, error_model="numpy")
def _write(key, value, slots, key_cache, value_cache):
    """Rows of keys and values, [T, .] bits, to rows `slots` of the caches; negative slots are skipped."""
    for token in range(len(slots)):
        if slots[token] >= 0:
            key_cache[slots[token]] = key[token]
            value_cache[slots[token]] = value[token]


def write_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`mambalign.kernels.attention.write_kv_varlen` for fp32 and bf16 tensors on a CPU."""
    width = key.shape[1] * key.shape[2]
    rows = (_bits(tensor.contiguous().view(-1, width)) for tensor in (key, value))
    caches = (_bits(tensor.view(-1, width)) for tensor in (key_cache, value_cache))
    _write(*rows, slot_mapping.contiguous().numpy(), *caches)


def paged_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """`mambalign.kernels.attention.paged_attention_varlen` for fp32 and bf16 tensors on a CPU."""
    out = torch.empty(query.shape, dtype=torch.float32)
    lens, contexts = rows.query_len.contiguous().numpy(), rows.context_len.contiguous().numpy()
    arguments = (
        query.float().contiguous().numpy(),
        _bits(key_cache),
        _bits(value_cache),
        np.uint32(UNSIGNED[key_cache.dtype][2]),
        rows.query_start.contiguous().numpy(),
        lens,
        contexts,
        rows.block_table.contiguous().numpy(),
        rows.first_key,
        np.float32(scale * LOG2_E),
    )
    num_workers = torch.get_num_threads()
    if num_workers > 1 and 2 * query[0].numel() * int(lens.astype(np.int64) @ (contexts + lens)) > PARALLEL_WORK:
        pool = _pool(num_workers, os.getpid())
        list(pool.map(lambda worker: _attend(*arguments, worker, num_workers, out.numpy()), range(num_workers)))
    else:
        _attend(*arguments, 0, 1, out.numpy())
    return out.to(query.dtype)


def warm_up(dtype: torch.dtype) -> None:
    """Compile for caches of `dtype` now, a few seconds once a machine, and not in the first request."""
    zero, one = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    caches = torch.zeros(2, 1, 1, 1, 1, dtype=dtype).unbind()
    token = torch.zeros(1, 1, 1, dtype=dtype)
    write_kv(*caches, token, token, torch.zeros(1, dtype=torch.int64))
    paged_attention(token, *caches, AttentionRows(zero, one, zero, zero[None], 1, 1), 1.0)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    signed, unsigned, _ = UNSIGNED[tensor.dtype]
    return tensor.view(signed).numpy().view(unsigned)


@cache
def _pool(num_workers: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process: those of a parent do not survive a fork."""
    return ThreadPoolExecutor(num_workers, "attention")
