"""Causal attention over a paged KV cache, and the write of new keys and values into it.

Formula: o_i = sum_j softmax_j(q_i . k_j * scale) v_j over the visible keys j, in fp32.

A query's bits depend on its position and its keys only: not on the batch, on how a text was cut into steps, or on the
blocks it lies in. A GPU runs the kernels of `kernels/attention_triton.py`, a CPU those of `kernels/cpu/attention.py`;
both say how they keep that promise. The references are what both are compared with, within a tolerance.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.attention_triton import launch_attention, launch_write

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
    if num_heads % kv_heads or num_heads > MOST_GROUP * kv_heads or scale <= 0:
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
