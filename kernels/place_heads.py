"""New heads to their places: queries and keys normed and brought to their positions, keys and values into the cache.

Formula, for a layer that has both: x = weight * (x * rsqrt(mean(x^2 of the head) + eps)), rounded; then, on the first
2 * half channels, x_j * cos -+ x_partner * sin, rounded. A layer may have either or none: its keys and values are then
copied as they are. On a CPU three functions do it one after the other. On a GPU one launch does where heads are normed,
a warp a head. Heads that are only turned are turned by one that takes all of a token's together, and copied by another:
a prompt of 4,096 tokens takes 18 us so on an H200, and 237 a head at a time.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.attention import check_layout, write_kv_varlen
from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.head_norm import HeadNorms, norm_heads
from mambalign.kernels.rotary import rotary_embed, rotary_embed_on_gpu

WORD_BYTES = 16  # widest load of a thread


@triton.jit
def _placed(
    p_head, p_weight, p_table, position, last_position, eps,
    D: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The head [BLOCK] at p_head, normed, then turned to its position; fp32, rounded after each. Or as it is."""
    o_d = tl.arange(0, BLOCK)
    is_low, is_turned = o_d < HALF, o_d < 2 * HALF
    p_x, p_own_weight = p_head + o_d, p_weight + o_d
    b_x = tl.load(p_x, mask=o_d < D, other=0.0)
    if HAS_NORM:
        b_weight = tl.load(p_own_weight, mask=o_d < D, other=0.0)
        if HALF > 0:  # all is loaded before anything waits
            o_partner = tl.where(is_low, o_d + HALF, o_d - HALF)
            p_partner, p_partner_weight = p_head + o_partner, p_weight + o_partner
            b_partner = tl.load(p_partner, mask=is_turned, other=0.0)
            b_partner_weight = tl.load(p_partner_weight, mask=is_turned, other=0.0)
            i_line = tl.minimum(tl.maximum(position, 0), last_position).to(tl.int64)
            p_cos = p_table + i_line * (2 * HALF) + tl.where(is_low, o_d, o_d - HALF)
            b_cos = tl.load(p_cos, mask=is_turned, other=0.0)
            b_sin = tl.load(p_cos + HALF, mask=is_turned, other=0.0)
        b_x32 = b_x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(b_x32 * b_x32, 0) / D + eps)
        b_x = (b_weight * (b_x32 * scale)).to(b_x.dtype)
        if HALF > 0:
            b_partner = (b_partner_weight * (b_partner.to(tl.float32) * scale)).to(b_x.dtype)
            b_product = b_partner.to(tl.float32) * tl.where(is_low, -b_sin, b_sin)
            b_x = tl.where(is_turned, tl.fma(b_x.to(tl.float32), b_cos, b_product).to(b_x.dtype), b_x)
    return b_x


@triton.jit(
    do_not_specialize=["q_stride", "k_stride", "v_stride", "last_position"],
    do_not_specialize_on_alignment=["p_slot", "p_positions"],
)
def place_heads_kernel(
    p_query, p_key, p_value, p_key_cache, p_value_cache, p_slot, p_positions, p_table, p_q_weight, p_k_weight,
    q_stride, k_stride, v_stride, last_position, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr, WORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """query = rotary(norm(query)) in place; key cache[slot] = rotary(norm(key)); value cache[slot] = value.

    Without HAS_NORM nothing is normed or turned. HALF = 0: no rotary.

    Grid (tokens, heads of query, then of key, then of value). A program owns one head of one token; that of a key or a
    value writes nothing when the slot is negative. Reads heads, slots, positions, that line of the table, weights;
    writes queries and caches. fp32, rounded after the norm and after the turn. WORD divides the strides.
    """
    wait_for_inputs(PDL)
    i_token, i_head, o_d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    position = tl.load(p_positions + i_token) if HALF > 0 else 0
    if i_head < HEADS:
        p_head = p_query + i_token * (q_stride // WORD * WORD) + i_head * D
        b_x = _placed(p_head, p_q_weight, p_table, position, last_position, eps, D, HALF, HAS_NORM, BLOCK)
        tl.debug_barrier()  # what is turned is read by two threads: all have read before one writes
        tl.store(p_head + o_d, b_x, mask=o_d < D)
    else:
        slot, i_kv_head = tl.load(p_slot + i_token), (i_head - HEADS) % KV_HEADS
        o_cache = (slot * KV_HEADS + i_kv_head) * D + o_d
        mask = o_d < tl.where(slot >= 0, D, 0)
        if i_head < HEADS + KV_HEADS:
            p_head = p_key + i_token * (k_stride // WORD * WORD) + i_kv_head * D
            b_x = _placed(p_head, p_k_weight, p_table, position, last_position, eps, D, HALF, HAS_NORM, BLOCK)
            tl.store(p_key_cache + o_cache, b_x, mask=mask)
        else:
            p_head = p_value + i_token * (v_stride // WORD * WORD) + i_kv_head * D
            tl.store(p_value_cache + o_cache, tl.load(p_head + o_d, mask=o_d < D), mask=mask)


def place_heads_on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    norms: HeadNorms | None = None,
    table: torch.Tensor | None = None,
) -> None:
    """`place_heads` by its kernels."""
    num_heads, kv_heads, head_dim = query.shape[1], key.shape[1], key.shape[2]
    half, num_warps = 0 if table is None else table.shape[2], 1
    if norms is None:  # the heads of a token are copied as one, all of them turned before if they have to be
        if table is not None:
            rotary_embed_on_gpu(query, key, positions, table)
        num_heads, kv_heads, head_dim, half, num_warps = 0, 1, kv_heads * head_dim, 0, 4
    word = WORD_BYTES // key.element_size()
    if any(x.stride(0) % word or x.data_ptr() % WORD_BYTES for x in (query, key, value)) or head_dim % word:
        word = 1
    q_weight, k_weight, eps = norms or HeadNorms(key_cache, key_cache, 0.0)  # what a layer lacks is not read
    if len(key):
        place_heads_kernel[len(key), num_heads + 2 * kv_heads](
            query, key, value, key_cache, value_cache, slot_mapping, positions, table if half else key_cache,
            q_weight, k_weight, query.stride(0), key.stride(0), value.stride(0), len(table) - 1 if half else 0, eps,
            num_heads, kv_heads, head_dim, half, norms is not None, triton.next_power_of_2(head_dim), word,
            num_warps=num_warps, **pdl(key.device),
        )  # fmt: skip


def place_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    norms: HeadNorms | None = None,
    table: torch.Tensor | None = None,
) -> None:
    """Norm and turn query [T, heads, D] in place; put key, so treated, and value [T, kv_heads, D] into the caches.

    Caches [blocks, kv_block_tokens, kv_heads, D]; slot_mapping int64 [T], block id * kv_block_tokens + offset: a token
    with a negative one is not written. positions int64 [T]; one outside the table takes the nearest line. norms: of
    heads, none by default. table: of `rotary_table`, with half <= D / 2; no rotary by default. Tokens may lie apart
    (views), the channels of one token not. Afterwards `key` may hold anything. Raises ValueError for what does not fit.
    """
    check_layout(key_cache, value_cache, query, key, value)
    if key.shape != value.shape or key.shape[1] != key_cache.shape[2]:
        raise ValueError(f"keys {tuple(key.shape)}, values {tuple(value.shape)} of a cache {tuple(key_cache.shape)}")
    if norms is not None and (norms.q_weight.shape != query.shape[2:] or norms.k_weight.shape != query.shape[2:]):
        raise ValueError(f"norms of {tuple(norms.q_weight.shape)}, {tuple(norms.k_weight.shape)} on {query.shape[2]}")
    if table is not None and query.shape[2] < 2 * table.shape[2]:
        raise ValueError(f"a rotary table {tuple(table.shape)} for heads of {query.shape[2]}")
    if query.is_cuda:
        place_heads_on_gpu(query, key, value, key_cache, value_cache, slot_mapping, positions, norms, table)
        return
    if norms is not None:
        norm_heads(query, key, norms)
    if table is not None:
        rotary_embed(query, key, positions, table)
    write_kv_varlen(key_cache, value_cache, key, value, slot_mapping)
