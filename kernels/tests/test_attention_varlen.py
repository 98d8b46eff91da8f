"""Attention over rows that device tensors describe: values, and the same bits however a text is cut, batched, placed.

Free slots and blocks hold NaN. Each step has an inert row and padding tokens. The Triton kernels run compiled on a GPU,
else through the interpreter on smaller tiles and texts.
"""

import copy
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from numba import njit

from mambalign.kernels import attention_triton
from mambalign.kernels.attention import (
    paged_attention_varlen,
    paged_attention_varlen_reference,
    write_kv_varlen,
    write_kv_varlen_reference,
)
from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.attention_triton import launch_attention
from mambalign.kernels.cpu import attention as cpu
from mambalign.kernels.place_heads import place_heads_on_gpu
from mambalign.kernels.tolerances import tolerance

Attend = Callable[..., torch.Tensor]
ON_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Shape:
    num_heads: int
    kv_heads: int
    head_dim: int
    kv_block_tokens: int


DEFAULT = Shape(4, 2, 64, 16)
SHAPES = [DEFAULT, Shape(6, 2, 10, 16), Shape(3, 1, 33, 48), Shape(8, 8, 80, 7), Shape(5, 1, 128, 256)]
EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1025]


class Text:
    """One text: its queries, keys and values as views of one projection, and how far it is computed."""

    def __init__(self, shape: Shape, num_tokens: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        widths = [shape.num_heads, shape.kv_heads, shape.kv_heads]
        self.qkv = torch.randn(num_tokens, sum(widths), shape.head_dim, generator=generator)
        self.qkv[:, shape.num_heads :] *= 2.0 ** torch.randint(-4, 1, (num_tokens, 1, 1), generator=generator)
        self.blocks: list[int] = []
        self.num_computed = 0
        self.outputs: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self.qkv)

    @property
    def output(self) -> torch.Tensor:
        return torch.cat(self.outputs)


class Cache:
    """Poisoned blocks, handed out in random order, and the functions under test."""

    def __init__(self, shape: Shape, attend: Attend, write=write_kv_varlen, dtype=torch.float32, device="cpu", seed=0):
        self.shape, self.attend, self.write, self.dtype, self.device = shape, attend, write, dtype, device
        self.slack = 1  # the bounds of a captured launch are seldom reached
        num_blocks = 12 + 4096 // shape.kv_block_tokens
        pool = (num_blocks, shape.kv_block_tokens, shape.kv_heads, shape.head_dim)
        self.keys, self.values = torch.full((2, *pool), torch.nan, dtype=dtype, device=device).unbind()
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)

    def step(self, texts: list[Text], lens: list[int], first_key: int = 0) -> None:
        """The next `lens[i]` tokens of each text, behind an inert row, between padding tokens."""
        size = self.shape.kv_block_tokens
        parts = [slice(text.num_computed, text.num_computed + n) for text, n in zip(texts, lens, strict=True)]
        for text, part in zip(texts, parts, strict=True):
            while len(text.blocks) * size < part.stop:
                text.blocks.append(self.free.pop())
        width = max(len(text.blocks) for text in texts) + 1
        table = [[0] * width, *(text.blocks + [0] * (width - len(text.blocks)) for text in texts)]
        slots = [-1, -1]
        for text, part in zip(texts, parts, strict=True):
            slots += [text.blocks[p // size] * size + p % size for p in range(part.start, part.stop)]
        padding = torch.full((1, *texts[0].qkv.shape[1:]), torch.nan)
        qkv = torch.cat([padding, padding, *(text.qkv[part] for text, part in zip(texts, parts, strict=True)), padding])
        query, key, value = qkv.to(self.device, self.dtype).split(
            [self.shape.num_heads, self.shape.kv_heads, self.shape.kv_heads], dim=1
        )
        starts = np.cumsum([2, *lens]).tolist()
        ints = partial(torch.tensor, dtype=torch.int32, device=self.device)
        rows = AttentionRows(
            query_start=ints([0, *starts[:-1]]),
            query_len=ints([0, *lens]),
            context_len=ints([0, *(part.start for part in parts)]),
            block_table=ints(table),
            max_query_len=max(lens) + self.slack,
            max_context_len=max(part.stop for part in parts) + 40,
            first_key=first_key,
        )
        self.write(self.keys, self.values, key, value, torch.tensor([*slots, -1], device=self.device))
        out = self.attend(query, self.keys, self.values, rows, self.shape.head_dim**-0.5)
        assert out.dtype == self.dtype and out.is_contiguous() and out.shape == query.shape
        for text, output, n in zip(texts, out[2:-1].split(lens), lens, strict=True):
            text.outputs.append(output)
            text.num_computed += n
        assert self.keys[0].isnan().all() and self.values[0].isnan().all()

    def run(self, length: int, seed: int, cuts: list[int], first_key: int = 0) -> torch.Tensor:
        """A text alone, in steps of these many tokens, the last one repeated."""
        text, steps = Text(self.shape, length, seed), list(cuts)
        while text.num_computed < length:
            n = steps.pop(0) if len(steps) > 1 else steps[0]
            self.step([text], [min(n, length - text.num_computed)], first_key)
        return text.output


def dense(text: Text, shape: Shape, first_key: int = 0) -> torch.Tensor:
    """The formula over the whole text, fp64, without a cache."""
    widths = [shape.num_heads, shape.kv_heads, shape.kv_heads]
    query, key, value = text.qkv.double().transpose(0, 1).split(widths)
    key, value = (t.repeat_interleave(shape.num_heads // shape.kv_heads, 0) for t in (key, value))
    scores = query @ key.transpose(1, 2) * shape.head_dim**-0.5
    position = torch.arange(len(text))
    hidden = (position > position[:, None]) | (position < first_key)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ value).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attend", [paged_attention_varlen_reference, paged_attention_varlen])
def test_values(attend: Attend, shape: Shape, dtype: torch.dtype) -> None:
    for first_key in (0, 1):
        cache = Cache(shape, attend, dtype=dtype)
        texts = [Text(shape, n, seed=n) for n in (1, 2, 64, 65, 300)]
        for text in texts:
            text.qkv = text.qkv.to(dtype).float()
        cache.step(texts, [1, 1, 60, 65, 200], first_key)
        cache.step(texts[1:3] + texts[4:], [1, 4, 100], first_key)
        for text in texts:
            want = dense(text, shape, first_key).to(dtype)
            torch.testing.assert_close(text.output, want, **tolerance("kernel", dtype))


@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_cuts_batch_or_blocks(shape: Shape, first_key: int) -> None:
    lengths = [1, 2, 63, 64, 65, 290, 517]
    whole = [Cache(shape, paged_attention_varlen, seed=n).run(n, n, [n], first_key) for n in lengths]
    for seed in range(2):
        source, cache = random.Random(seed), Cache(shape, paged_attention_varlen, seed=seed)
        texts = [Text(shape, length, seed=length) for length in lengths]
        while waiting := [text for text in texts if text.num_computed < len(text)]:
            chosen = source.sample(waiting, source.randint(1, len(waiting)))
            pieces = [source.choice((1, 2, 3, 4, 8, 15, 16, 17, 100, 300)) for _ in chosen]
            lens = [min(n, len(text) - text.num_computed) for text, n in zip(chosen, pieces, strict=True)]
            cache.step(chosen, lens, first_key)
        for text, want in zip(texts, whole, strict=True):
            assert torch.equal(text.output, want), (seed, len(want))


@pytest.mark.parametrize("context", [n for n in EDGES if n > 1])
def test_bits_of_one_query_and_of_verification_equal_prefill(context: int) -> None:
    whole = Cache(DEFAULT, paged_attention_varlen).run(context + 8, 0, [context + 8])
    for cuts in ([context, 1], [context, 4], [context - 1, 3, 2], [context // 2, 5]):
        assert torch.equal(Cache(DEFAULT, paged_attention_varlen, seed=1).run(context + 8, 0, cuts), whole), cuts


def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    want = Cache(DEFAULT, paged_attention_varlen).run(300, 0, [200, 100])
    monkeypatch.setattr(cpu, "PARALLEL_WORK", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(Cache(DEFAULT, paged_attention_varlen).run(300, 0, [200, 100]), want)
    assert cpu._pool.cache_info().currsize


def test_zeros_are_positive_and_a_query_without_keys_gives_zero() -> None:
    cache, text = Cache(DEFAULT, paged_attention_varlen), Text(DEFAULT, 5, seed=0)
    cache.step([text], [5], first_key=1)
    assert torch.equal(text.output[0].view(torch.int32), torch.zeros_like(text.output[0], dtype=torch.int32))
    assert text.output[1:].abs().min() > 0


def test_a_masked_key_slot_may_hold_anything() -> None:
    """The drafter's slot 0 is never written: NaN there must not reach an output."""
    outputs = []
    for fill in (torch.nan, 0.0):
        cache, text = Cache(DEFAULT, paged_attention_varlen), Text(DEFAULT, 40, seed=0)
        text.blocks, text.num_computed = [cache.free[-1]], 1
        cache.free.pop()
        cache.keys[text.blocks[0], 0], cache.values[text.blocks[0], 0] = fill, fill
        cache.step([text], [39], first_key=1)
        outputs.append(text.output)
    assert torch.equal(*outputs) and not outputs[0].isnan().any()


def test_exp2_is_within_two_units_in_the_last_place() -> None:
    function = cpu._exp2

    @njit
    def run(x, y):
        for i in range(len(x)):
            y[i] = function(x[i])

    x = np.concatenate([np.linspace(-126, 0, 1 << 20), -np.logspace(-9, 0, 1 << 16), [0.0]]).astype(np.float32)
    y = np.empty_like(x)
    run(x, y)
    want = np.exp2(x.astype(np.float64))
    assert (np.abs(y - want) / np.spacing(want.astype(np.float32))).max() <= 2.0
    assert y[-1] == 1.0
    low = np.array([-126.5, -1e4, -1e30, -np.inf], np.float32)
    run(low, y)
    assert (y[:4] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_write(dtype: torch.dtype) -> None:
    caches = [torch.zeros(2, 6, 5, 2, 7, dtype=dtype) for _ in range(2)]
    qkv = torch.randn(6, 8, 7).to(dtype)
    key, value = qkv[:, 4:6], qkv[:, 6:]
    slots = torch.tensor([7, -1, 29, 0, -3, 12])
    for cache, write in zip(caches, (write_kv_varlen, write_kv_varlen_reference), strict=True):
        write(*cache.unbind(), key, value, slots)
    assert torch.equal(*caches)
    assert torch.equal(caches[0][0].view(-1, 2, 7)[slots[slots >= 0]], key[slots >= 0])
    assert caches[0].count_nonzero() == 2 * 4 * 14


def test_layouts_that_do_not_fit_are_refused() -> None:
    caches = torch.zeros(2, 3, 4, 2, 8).unbind()
    one = torch.ones(1, dtype=torch.int32)
    rows = AttentionRows(one, one, one, one[None], 1, 1)
    for query in (
        torch.zeros(1, 4, 7),
        torch.zeros(1, 5, 8),
        torch.zeros(1, 66, 8),
        torch.zeros(1, 4, 8).half(),
        torch.zeros(1, 8, 4).mT,
    ):
        with pytest.raises(ValueError):
            paged_attention_varlen(query, *caches, rows, 1.0)
        with pytest.raises(ValueError):
            paged_attention_varlen(torch.zeros(1, 4, 8), *caches, rows, 1.0, query)
    with pytest.raises(ValueError):
        paged_attention_varlen(torch.zeros(1, 4, 8), *(cache.transpose(1, 2) for cache in caches), rows, 1.0)


# The Triton kernels.


SMALL = [Shape(4, 2, 16, 4), Shape(6, 2, 10, 7), Shape(3, 1, 33, 16)]
GPU_SHAPES = [
    Shape(32, 8, 128, 16),
    Shape(6, 2, 10, 16),
    Shape(4, 2, 64, 16),
    Shape(5, 1, 128, 256),
    Shape(16, 4, 256, 16),
]
TILES = {} if ON_GPU else {"split_tokens": 32, "tiles": attention_triton.Tiles(16, 16, 4, 1)}
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]  # the interpreter multiplies bf16 as integers


def write_by_kernel(keys, values, key, value, slots: torch.Tensor) -> None:
    place_heads_on_gpu(key, key, value, keys, values, slots, slots)


def triton_cache(shape: Shape, by_split: bool | None, dtype: torch.dtype, device: str, seed: int = 0) -> Cache:
    attend = partial(launch_attention, by_split=by_split, **TILES)
    return Cache(shape, attend, write_by_kernel, dtype, device, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GPU_SHAPES if ON_GPU else SMALL)
def test_kernel_values(device: str, shape: Shape, dtype: torch.dtype) -> None:
    lens = [1, 33, 70]
    for first_key in (0, 1):
        cache = triton_cache(shape, None, dtype, device)
        texts = [Text(shape, n + 2, seed=n) for n in lens]
        for text in texts:
            text.qkv = text.qkv.to(dtype).float()
        cache.step(texts, lens, first_key)
        cache.step(texts, [2, 2, 2], first_key)
        for text in texts:
            want = dense(text, shape, first_key).to(dtype)
            close = tolerance("kernel", torch.float32 if dtype == torch.float32 else torch.bfloat16)
            torch.testing.assert_close(text.output.cpu(), want, **close)


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[:1])
@pytest.mark.parametrize("shape", GPU_SHAPES if ON_GPU else SMALL[:2])
def test_kernel_bits(device: str, shape: Shape, dtype: torch.dtype) -> None:
    """One query or a few at a time, splits side by side or not, alone or in a batch: as one whole prefill."""
    lengths = EDGES if ON_GPU else [31, 65]
    whole = [triton_cache(shape, False, dtype, device).run(n + 4, n, [n + 4]) for n in lengths]
    most_rows = attention_triton.MOST_SPLIT_ROWS[dtype.itemsize] if ON_GPU else 16
    most = most_rows // (shape.num_heads // shape.kv_heads)  # queries whose splits run side by side
    for length, want in zip(lengths, whole, strict=True):
        for first, later in ((length, (1, min(3, most), most // 2)), (max(1, length * 3 // 4), (most,))):
            begun = triton_cache(shape, False, dtype, device, seed=1), Text(shape, length + 4, seed=length)
            begun[0].step([begun[1]], [first])
            for num_queries, by_split in itertools.product(later, (True, False)):
                cache, text = copy.deepcopy(begun)
                cache.slack, cache.attend = 0, partial(launch_attention, by_split=by_split, **TILES)
                while text.num_computed < len(text):
                    cache.step([text], [min(num_queries, len(text) - text.num_computed)])
                assert torch.equal(text.output, want), (length, by_split, first, num_queries)
    cache = triton_cache(shape, None, dtype, device, seed=2)
    texts = [Text(shape, n + 4, seed=n) for n in lengths]
    cache.step(texts, lengths)
    cache.step(texts, [4 if most >= 4 else 2] * len(texts))
    for text, want in zip(texts, whole, strict=True):
        assert torch.equal(text.output, want[: text.num_computed]), len(text)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GPU_SHAPES if ON_GPU else SMALL)
def test_kernel_gate(device: str, shape: Shape, dtype: torch.dtype) -> None:
    """What is attended is rounded, then gated, then rounded, whether splits are merged in a launch of their own or not;
    gates are a view of a projection, as are queries.
    """
    paths = []

    def attend(query, keys, values, rows, scale) -> torch.Tensor:
        wide = torch.randn(len(query), 3, *query.shape[1:], generator=torch.Generator().manual_seed(len(query)))
        gate, of_rows = wide.to(device, dtype)[:, 1], slice(2, -1)
        for by_split in (False, True) if rows.max_query_len < 4 else (False,):
            run = partial(launch_attention, query, keys, values, rows, scale, by_split=by_split, **TILES)
            plain, gated = run(), run(gate)[of_rows].cpu()
            x, g = (each[of_rows].float().cpu().numpy() for each in (plain, gate))
            want = torch.from_numpy(x / (1 + np.exp(-g))).to(dtype)
            if ON_GPU:  # its exp is another
                torch.testing.assert_close(gated, want, **tolerance("kernel", dtype))
            else:
                assert torch.equal(gated, want)
            paths.append(by_split)
        return plain

    cache, texts = Cache(shape, attend, write_by_kernel, dtype, device), [Text(shape, n, seed=n) for n in (43, 36)]
    cache.step(texts, [41, 34])
    cache.step(texts, [2, 2])
    assert paths == [False, False, True]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mambalign.kernels import attention_triton as a

def build(kernel, kinds, constants, num_warps, num_stages=2):
    names, constants = kernel.arg_names, constants | {"PDL": True}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    aligned = [(i,) for i, name in enumerate(names) if signature[name].startswith("*")]
    source = ASTSource(kernel, signature, constants, {place: [["tt.divisibility", 16]] for place in aligned})
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

SHAPES = (("bf16", 32, 8, 128), ("bf16", 4, 1, 64), ("bf16", 16, 4, 256), ("fp32", 4, 2, 64), ("fp32", 32, 8, 128))
for kind, heads, kv_heads, dim in SHAPES:
    tensor, ints = "*" + kind, "*i32"
    kinds = {"scale_log2": "fp32", "p_part": "*fp32", "p_part_scalars": "*fp32"}
    kinds |= dict.fromkeys(("p_query", "p_out", "p_gate", "p_key_cache", "p_value_cache"), tensor)
    kinds |= dict.fromkeys(("p_query_start", "p_query_len", "p_context_len", "p_block_table"), ints)
    kinds |= dict.fromkeys(("query_stride", "table_width", "num_used", "num_splits", "first_key"), "i32")
    shape = {"GROUP": heads // kv_heads, "KV_HEADS": kv_heads, "HEAD_DIM": dim, "BLOCK_D": dim, "SPLIT_TOKENS": 512}
    number_bytes, gate = 4 if kind == "fp32" else 2, {"GATE_STRIDE": 10240 if dim == 256 else 0}
    for by_split, num_used in ((True, 16), (True, 32), (True, 64), (False, 1000)):
        if num_used <= a.MOST_SPLIT_ROWS[number_bytes] or not by_split:
            tiles = a.tiles_for(num_used, dim, number_bytes, by_split)
            attending = {"KV_BLOCK": 16, "SPLIT_BLOCKS": 64, "KEY_TILE": tiles.keys, "TILE_ROWS": tiles.rows}
            kernel = a.attention_splits_kernel if by_split else a.attention_rows_kernel
            attending |= {} if by_split else gate
            built = build(kernel, kinds, shape | attending, tiles.num_warps, tiles.num_stages)
            print(kernel.__name__, kind, dim, num_used, "shared", built.metadata.shared)
            assert built.metadata.shared <= 232448, (dim, num_used, built.metadata.shared)  # of a multiprocessor
    built = build(a.attention_merge_kernel, kinds, shape | gate | {"MERGE_ROWS": a.MERGE_ROWS}, 4)
    print(built.name, kind, dim, "shared", built.metadata.shared, len(built.asm["cubin"]))
"""


def test_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shared") == 3 * 5 + 2 * 4
