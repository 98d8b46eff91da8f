"""Causal attention over a paged KV cache, and the write of new keys and values into it.

Formula: o_i = sum_j softmax_j(q_i . k_j * scale) v_j over the visible keys j, in fp32.

A query's bits depend on its position and its keys only: not on the batch, on how a text was cut into steps, or on the
blocks it lies in. A GPU runs the kernels of `kernels/attention_triton.py`, a CPU those of `kernels/cpu/attention.py`;
both say how they keep that promise. The references are what both are compared with, within a tolerance.
"""

import torch

from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.attention_triton import launch_attention
from mambalign.kernels.sigmoid_mul import sigmoid_mul

MOST_GROUP = 32  # heads that share a kv head
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
    of key and value may lie apart (views), heads of a token not. On a GPU `place_heads` does it.
    """
    if key.dtype in CPU_DTYPES:
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
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: AttentionRows,
    scale: float,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from query [T, heads, head_dim] to the caches [blocks, kv_block_tokens, kv_heads, head_dim].

    The rows' own keys must be in the cache already. Query head h uses key head h // (heads / kv_heads). Returns
    [T, heads, head_dim], contiguous, in the dtype of query: 0 for a query without visible keys, anything for a token
    of no row. gate: as query; what is attended is rounded, then multiplied by sigmoid(gate). Tokens of query and of
    gate may lie apart (views). Raises ValueError for layouts that do not fit.
    """
    check_layout(key_cache, value_cache, query, *(() if gate is None else (gate,)))
    num_heads, kv_heads = query.shape[1], key_cache.shape[2]
    if num_heads % kv_heads or num_heads > MOST_GROUP * kv_heads or scale <= 0:
        raise ValueError(f"attention of {num_heads} heads over {kv_heads} kv heads, scale {scale}")
    if gate is not None and gate.shape != query.shape:
        raise ValueError(f"a gate {tuple(gate.shape)} of queries {tuple(query.shape)}")
    if query.is_cuda:
        return launch_attention(query, key_cache, value_cache, rows, scale, gate)
    if query.dtype in CPU_DTYPES:
        from mambalign.kernels.cpu import attention as cpu

        out = cpu.paged_attention(query, key_cache, value_cache, rows, scale)
    else:
        out = paged_attention_varlen_reference(query, key_cache, value_cache, rows, scale)
    return out if gate is None else sigmoid_mul(out, gate)


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


def check_layout(key_cache: torch.Tensor, value_cache: torch.Tensor, *tokens: torch.Tensor) -> None:
    """Raises ValueError unless tokens [T, some heads, head_dim], perhaps views, suit the paged caches."""
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and key_cache.shape == value_cache.shape):
        raise ValueError("attention wants contiguous key and value caches of one shape")
    for each in tokens:
        if each.shape[2] != key_cache.shape[3] or each.dtype != key_cache.dtype or not each[:1].is_contiguous():
            raise ValueError(
                f"tokens {tuple(each.shape)}, strides {each.stride()}, {each.dtype}, for a cache of "
                f"{tuple(key_cache.shape)}, {key_cache.dtype}"
            )
