"""Causal attention over a paged KV cache: the torch reference.

Formula: o_i = sum_j softmax_j(q_i . k_j / sqrt(d)) v_j over the visible keys j, in fp32.

Keys are walked in tiles of `KV_TILE` tokens at absolute multiples, whatever the row's length or the way its prefill
was cut. A tile gives each query a maximum, a sum of exponentials and a weighted sum of values; tiles are merged in
order, relative to the largest maximum. A tile without visible keys adds exact zeros, so rows of different lengths
are padded to one number of tiles and run together. Values of invisible keys are set to 0 on load: what lies in a
block past the row's end (NaN, perhaps) is never computed with.

A matrix library may use another kernel for few query rows; every product here has at least `min_query_rows` of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

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
    """Rows that run together: R rows of Q queries each (padded), over the same number of key tiles."""

    query_index: torch.Tensor  # [R, Q] token of each query; padding repeats the row's last
    valid: torch.Tensor | None  # [R, Q] bool, None when nothing is padding
    blocks: torch.Tensor  # [R, blocks] ids of the KV blocks that cover the tiles
    num_tiles: int
    hidden_scores: torch.Tensor  # [R * tiles, Q, KV_TILE] bool, keys that a query must not see
    hidden_values: torch.Tensor  # [R, tiles * KV_TILE, 1, 1] bool, keys that no query of the row may see


def plan_attention(batch, kv_block_tokens: int) -> list[AttentionGroup]:
    """Group the rows of an `AttentionBatch`; the result serves every attention layer of the pass."""
    device = batch.block_table.device
    return [
        _group(batch, rows, first, length, kv_block_tokens, device)
        for rows, first, length in _pieces(batch.query_lens, batch.context_lens)
    ]


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


def _group(batch, rows: list[int], first: int, length: int, kv_block_tokens: int, device) -> AttentionGroup:
    starts, total = [], 0
    for query_len in batch.query_lens:
        starts.append(total)
        total += query_len
    lengths = [min(length, batch.query_lens[row] - first) for row in rows]
    num_keys = [batch.context_lens[row] + first + n for row, n in zip(rows, lengths, strict=True)]
    num_tiles = -(-max(num_keys) // KV_TILE)

    # Queries of padding repeat the row's last one, so that they compute with nothing undefined.
    offset = torch.arange(length)[None].minimum(torch.tensor(lengths)[:, None] - 1)
    query_index = torch.tensor([starts[row] + first for row in rows])[:, None] + offset
    query_position = torch.tensor([batch.context_lens[row] + first for row in rows])[:, None] + offset
    valid = torch.arange(length)[None] < torch.tensor(lengths)[:, None]

    key_position = torch.arange(num_tiles * KV_TILE)
    hidden = (key_position > query_position[..., None]) | (key_position < batch.first_key)  # [R, Q, keys]
    hidden_scores = hidden.view(len(rows), length, num_tiles, KV_TILE).transpose(1, 2).reshape(-1, length, KV_TILE)
    hidden_values = (key_position >= torch.tensor(num_keys)[:, None]) | (key_position < batch.first_key)

    num_blocks = -(-num_tiles * KV_TILE // kv_block_tokens)
    table = batch.block_table[rows, :num_blocks].long()
    blocks = torch.nn.functional.pad(table, (0, num_blocks - table.shape[1]))
    return AttentionGroup(
        query_index.to(device),
        None if bool(valid.all()) else valid.to(device),
        blocks,
        num_tiles,
        hidden_scores.to(device),
        hidden_values[..., None, None].to(device),
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
    out = torch.empty_like(query)
    for group in plan:
        result = _attend(query[group.query_index], key_cache, value_cache, group, scale).to(out.dtype)
        if group.valid is None:
            out[group.query_index] = result
        else:
            out[group.query_index[group.valid]] = result[group.valid]
    return out


def _attend(query, key_cache, value_cache, group: AttentionGroup, scale: float) -> torch.Tensor:
    """query [R, Q, heads, head_dim] -> [R, Q, heads, head_dim], fp32."""
    num_rows, num_queries, num_heads, head_dim = query.shape
    kv_heads, num_tiles = key_cache.shape[2], group.num_tiles
    heads_per_kv = num_heads // kv_heads
    keys = key_cache[group.blocks].flatten(1, 2)[:, : num_tiles * KV_TILE].float()
    values = value_cache[group.blocks].flatten(1, 2)[:, : num_tiles * KV_TILE].float()
    values = values.masked_fill(group.hidden_values, 0.0)
    keys = keys.reshape(num_rows * num_tiles, KV_TILE, kv_heads, head_dim)
    values = values.reshape(num_rows * num_tiles, KV_TILE, kv_heads, head_dim)

    query_rows = max(num_queries * heads_per_kv, min_query_rows(head_dim, query.device))
    out = torch.empty(num_rows, num_queries, kv_heads, heads_per_kv, head_dim, device=query.device)
    scaled = (query.float() * scale).view(num_rows, 1, num_queries, kv_heads, heads_per_kv, head_dim)
    for head in range(kv_heads):
        q = scaled[:, :, :, head].expand(-1, num_tiles, -1, -1, -1).reshape(num_rows * num_tiles, -1, head_dim)
        if query_rows > q.shape[1]:
            q = torch.nn.functional.pad(q, (0, 0, 0, query_rows - q.shape[1]))
        scores = torch.bmm(q, keys[:, :, head].transpose(1, 2))
        visible = scores[:, : num_queries * heads_per_kv].view(-1, num_queries, heads_per_kv, KV_TILE)
        visible.masked_fill_(group.hidden_scores[:, :, None], float("-inf"))
        top = scores.amax(-1, keepdim=True).clamp_(min=LOWEST)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        partial = torch.bmm(weights, values[:, :, head])
        merged = _merge_tiles(*(t.view(num_rows, num_tiles, query_rows, -1) for t in (top, total, partial)))
        out[:, :, head] = merged[:, : num_queries * heads_per_kv].view(num_rows, num_queries, heads_per_kv, head_dim)
    return out.view(num_rows, num_queries, num_heads, head_dim)


def _merge_tiles(top: torch.Tensor, total: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
    """Merge [R, tiles, M, 1], [R, tiles, M, 1], [R, tiles, M, D] over tiles, in order: [R, M, D]."""
    share = (top - top.amax(1, keepdim=True)).exp_()
    denominator = total[:, 0] * share[:, 0]
    numerator = partial[:, 0] * share[:, 0]
    for tile in range(1, top.shape[1]):
        denominator.addcmul_(total[:, tile], share[:, tile])
        numerator.addcmul_(partial[:, tile], share[:, tile])
    return torch.where(denominator > 0, numerator / denominator, 0.0)


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
