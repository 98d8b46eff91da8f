"""Paged attention: values of the formula, and the same bits in any pieces, batch and block ids."""

import random
from dataclasses import dataclass

import pytest
import torch

from mambalign.kernels.attention import KV_TILE, QUERY_BLOCK, paged_attention, plan_attention, write_kv
from mambalign.kernels.tolerances import tolerance


@dataclass
class Batch:
    """What the kernel reads of an `AttentionBatch`."""

    query_lens: list[int]
    context_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    first_key: int = 0


@dataclass(frozen=True)
class Shape:
    num_heads: int
    kv_heads: int
    head_dim: int
    kv_block_tokens: int


SHAPES = [Shape(4, 2, 64, 16), Shape(6, 2, 10, 16), Shape(3, 1, 33, 48), Shape(8, 8, 80, 7), Shape(5, 1, 128, 256)]


class Row:
    """One text: its queries, keys and values, and blocks for them."""

    def __init__(self, shape: Shape, num_tokens: int, blocks: list[int], seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.query = torch.randn(num_tokens, shape.num_heads, shape.head_dim, generator=generator)
        self.key, self.value = torch.randn(2, num_tokens, shape.kv_heads, shape.head_dim, generator=generator)
        num_blocks = -(-num_tokens // shape.kv_block_tokens)
        self.blocks = [blocks.pop() for _ in range(num_blocks)]
        self.num_computed = 0
        self.outputs: list[torch.Tensor] = []


class Cache:
    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0):
        self.shape, self.dtype = shape, dtype
        num_blocks = 12 + 2400 // shape.kv_block_tokens
        pool = (num_blocks, shape.kv_block_tokens, shape.kv_heads, shape.head_dim)
        self.keys, self.values = torch.full((2, *pool), torch.nan, dtype=dtype).unbind()
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)

    def row(self, num_tokens: int, seed: int) -> Row:
        return Row(self.shape, num_tokens, self.free, seed)

    def run(self, rows: list[Row], lens: list[int], first_key: int = 0) -> list[torch.Tensor]:
        """The next `lens[i]` tokens of each row."""
        size, width = self.shape.kv_block_tokens, max(len(row.blocks) for row in rows)
        parts = [slice(row.num_computed, row.num_computed + n) for row, n in zip(rows, lens, strict=True)]
        positions = [range(part.start, part.stop) for part in parts]
        slots = [r.blocks[p // size] * size + p % size for r, at in zip(rows, positions, strict=True) for p in at]
        table = torch.tensor([row.blocks + [0] * (width - len(row.blocks)) for row in rows], dtype=torch.int32)
        batch = Batch(lens, [part.start for part in parts], table, torch.tensor(slots), first_key)
        query, key, value = (
            torch.cat([getattr(row, name)[part] for row, part in zip(rows, parts, strict=True)]).to(self.dtype)
            for name in ("query", "key", "value")
        )
        write_kv(self.keys, self.values, key, value, batch.slot_mapping)
        plan = plan_attention(batch, size, self.shape.kv_heads)
        outputs = paged_attention(query, self.keys, self.values, plan, self.shape.head_dim**-0.5).split(lens)
        for row, n, output in zip(rows, lens, outputs, strict=True):
            row.outputs.append(output)
            row.num_computed += n
        return list(outputs)


def naive(row: Row, first_key: int = 0) -> torch.Tensor:
    heads_per_kv = row.query.shape[1] // row.key.shape[1]
    query = row.query.double().transpose(0, 1)
    key, value = (t.double().repeat_interleave(heads_per_kv, 1).transpose(0, 1) for t in (row.key, row.value))
    scores = query @ key.transpose(1, 2) * row.query.shape[-1] ** -0.5
    position = torch.arange(len(row.query))
    hidden = (position > position[:, None]) | (position < first_key)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ value).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: Shape, dtype: torch.dtype) -> None:
    cache = Cache(shape, dtype)
    rows = [cache.row(n, seed=n) for n in (1, 2, KV_TILE, KV_TILE + 1, 300)]
    outputs = cache.run(rows, [len(row.query) for row in rows])
    for row, output in zip(rows, outputs, strict=True):
        torch.testing.assert_close(output, naive(row).to(dtype), **tolerance("kernel", dtype))


@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_pieces_batch_or_blocks(shape: Shape, first_key: int) -> None:
    lengths = [1, 2, 63, KV_TILE - 1, KV_TILE, KV_TILE + 1, 290, 2 * QUERY_BLOCK + 5]
    whole = []
    for length in lengths:
        cache = Cache(shape, seed=length)
        whole += cache.run([cache.row(length, seed=length)], [length], first_key)
    for seed in range(2):
        source, cache = random.Random(seed), Cache(shape, seed=seed)
        rows = [cache.row(length, seed=length) for length in lengths]
        while waiting := [row for row in rows if row.num_computed < len(row.query)]:
            chosen = source.sample(waiting, source.randint(1, len(waiting)))
            pieces = [source.choice((1, 2, 3, 4, 8, 15, 16, 17, 100, 300)) for _ in chosen]
            lens = [min(n, len(row.query) - row.num_computed) for row, n in zip(chosen, pieces, strict=True)]
            cache.run(chosen, lens, first_key)
        for row, want in zip(rows, whole, strict=True):
            assert torch.equal(torch.cat(row.outputs), want), (seed, len(want))
        assert cache.keys[0].isnan().all() and cache.values[0].isnan().all()


def test_a_query_without_visible_keys_gives_zero() -> None:
    cache = Cache(SHAPES[0])
    row = cache.row(5, seed=0)
    (output,) = cache.run([row], [5], first_key=1)
    assert torch.equal(output[0], torch.zeros_like(output[0]))
    torch.testing.assert_close(output, naive(row, 1).float(), **tolerance("kernel", torch.float32))


def test_a_masked_key_slot_may_hold_anything() -> None:
    """The drafter's slot 0 is never written: NaN there must not reach an output."""
    cache, clean = Cache(SHAPES[0]), Cache(SHAPES[0])
    outputs = []
    for each in (cache, clean):
        row = each.row(40, seed=0)
        row.num_computed = 1
        if each is clean:
            each.keys[row.blocks[0], 0], each.values[row.blocks[0], 0] = 0.0, 0.0
        outputs += each.run([row], [39], first_key=1)
    assert torch.equal(*outputs)
