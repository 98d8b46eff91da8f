"""What a program of attention does with queries and a split of keys; why so: `kernels/attention_triton.py`."""

import triton
import triton.language as tl


@triton.jit
def _sum_in_any_order(b_weight):
    """Sums of rows of numbers from 0 to 1, each rounded to a multiple of 2^-23: whole numbers, which add up exactly."""
    b_whole = (b_weight + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
    return tl.sum(b_whole, 1).to(tl.float32) * (1.0 / (1 << 23))


@triton.jit
def load_blocks(p_blocks, first, table_width, KV_BLOCK: tl.constexpr, SPLIT_BLOCKS: tl.constexpr):
    """Blocks of the split that begins at key `first`, in one load, so that none of those of keys waits for another."""
    o_block = first // KV_BLOCK + tl.arange(0, SPLIT_BLOCKS)
    return tl.load(p_blocks + o_block, mask=o_block < table_width, other=0)


@triton.jit
def attend_split(
    b_query,
    b_position,
    p_key_cache,
    p_value_cache,
    b_blocks,
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
    first_block = first // KV_BLOCK
    for tile in range(first, last, KEY_TILE):
        o_key = tile + tl.arange(0, KEY_TILE)
        is_there = (o_key >= first_key) & (o_key < last)
        b_block = tl.gather(b_blocks, o_key // KV_BLOCK - first_block, 0).to(tl.int64)
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
        b_total = tl.fma(b_total, b_share, _sum_in_any_order(b_weight))
        b_value = tl.load(p_value_cache + o_cache, mask=mask, other=0.0)
        b_sum = tl.dot(b_weight.to(b_value.dtype), b_value, b_sum * b_share[:, None], input_precision="ieee")
        b_top = b_new_top
    return b_top, b_total, b_sum


@triton.jit
def merge(b_top, b_total, b_sum, b_split_top, b_split_total, b_split_sum, scale_log2):
    """(m, l, acc) of the splits so far, and of the next one with them."""
    b_new_top = tl.maximum(b_top, b_split_top)
    b_share = tl.exp2((b_top - b_new_top) * scale_log2)
    b_split_share = tl.exp2((b_split_top - b_new_top) * scale_log2)
    b_total = tl.fma(b_total, b_share, b_split_total * b_split_share)
    b_sum = tl.fma(b_sum, b_share[:, None], b_split_sum * b_split_share[:, None])
    return b_new_top, b_total, b_sum


@triton.jit
def normalise(b_total, b_sum):
    """acc / l, or 0 where no key was visible. Adding 0 makes every zero a positive one."""
    b_divisor = tl.where(b_total == 0.0, 1.0, b_total)
    return tl.div_rn(b_sum, tl.broadcast_to(b_divisor[:, None], b_sum.shape)) + 0.0


@triton.jit
def head_offsets(
    first_token, o_row, stride, i_kv_head, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """[rows, BLOCK_D], tile row i: head i % GROUP of the kv head's group, of query i // GROUP; `stride` of a token."""
    o_head = (first_token + o_row // GROUP).to(tl.int64) * stride
    o_head += (i_kv_head * GROUP + o_row % GROUP) * HEAD_DIM
    return o_head[:, None] + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_queries(
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
    """[TILE_ROWS, BLOCK_D] of `head_offsets`; 0 past the last query."""
    o_row, o_dim = tl.arange(0, TILE_ROWS), tl.arange(0, BLOCK_D)
    o_query = head_offsets(first_token, o_row, query_stride, i_kv_head, GROUP, HEAD_DIM, BLOCK_D)
    mask = (o_row // GROUP < num_queries)[:, None] & (o_dim < HEAD_DIM)[None, :]
    return tl.load(p_query + o_query, mask=mask, other=0.0)
