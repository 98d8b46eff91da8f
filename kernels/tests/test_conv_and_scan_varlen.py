"""Conv and scan over paged states: values of the formulas, and the same bits in any pieces, batch, layout and drafts.

Texts are run side by side in random pieces, by the torch reference, by the CPU kernels and by the Triton kernels
(compiled on a GPU, else interpreted). Pools are poisoned with NaN and blocks are handed out in random order, so that a
read of what was not written, or of a rejected draft, shows in the output.
"""

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from mambalign.kernels import (
    causal_conv1d,
    gated_delta_chunk_solve,
    mamba2_chunk_scan,
    mamba2_scan,
    mamba2_scan_triton,
    scan_tiles,
)
from mambalign.kernels.mamba2_chunk_scan import CHUNK, TILES
from mambalign.kernels.rows import Deferral, MambaRows
from mambalign.kernels.scan_tiles import has_room_for_inputs
from mambalign.kernels.tolerances import tolerance

MAX_DRAFTS = 7
DT_MIN = 1e-3
NUM_BLOCKS = 200


@dataclass
class Row:
    """One row of a step: its inputs, where its states are, and where they are to be left."""

    xbc: torch.Tensor
    dt: torch.Tensor
    conv_block: int
    temporal_block: int = -1
    conv_offset: int = 0
    is_decode: bool = False
    keep: dict[int, int] = field(default_factory=dict)  # token of the row -> block
    is_deferring: bool = False
    replays: list[int] = field(default_factory=list)  # blocks of drafts that the last step deferred, and were kept


@dataclass(frozen=True)
class Shape:
    num_heads: int
    head_dim: int
    num_groups: int
    d_state: int
    conv_width: int

    @property
    def conv_dim(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.d_state


SHAPES = [
    Shape(8, 64, 2, 64, 4),
    Shape(6, 10, 3, 12, 4),
    Shape(5, 9, 1, 7, 2),
    Shape(2, 48, 1, 128, 4),
    Shape(2, 1, 2, 3, 3),
    Shape(3, 16, 3, 16, 4),
]
SMALL_SHAPES = SHAPES[1:3]
EVERYWHERE = pytest.mark.parametrize("path", ["reference", "cpu"])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = pytest.mark.usefixtures("device")  # without a GPU
LAYOUTS = pytest.mark.parametrize("layout", ["SD", "DS"])
IMPORTED = (
    scan_tiles,
    mamba2_scan_triton,
    gated_delta_chunk_solve,
)  # by other modules for their device functions or kernels, in order


@cache
def with_kernels(module: ModuleType) -> ModuleType:
    """The module as it is on a GPU; else a copy of it whose kernels are interpreted."""
    if DEVICE == "cuda":
        return module
    spec = importlib.util.find_spec(module.__name__)
    copy = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for imported in IMPORTED[: IMPORTED.index(module) if module in IMPORTED else None]:
            patch.setitem(sys.modules, imported.__name__, with_kernels(imported))
        spec.loader.exec_module(copy)
    return copy


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """torch with so many threads on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Layer:
    """Random weights of one mixer between its two projections, and pools for its states."""

    def __init__(
        self,
        shape: Shape,
        path: str,
        layout: str = "SD",
        temporal_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        by_chunks: bool = False,
        chunk: int = CHUNK,
        plain_conv: bool = False,  # neither bias nor silu
    ):
        generator = torch.Generator().manual_seed(shape.conv_dim)
        self.shape, self.path, self.layout, self.dtype = shape, path, layout, dtype
        self.by_chunks, self.chunk, self.plain_conv = by_chunks, chunk, plain_conv
        self.device = DEVICE if path == "triton" else "cpu"
        self.conv_weight = torch.randn(shape.conv_width, shape.conv_dim, generator=generator)
        self.conv_bias = torch.randn(shape.conv_dim, generator=generator)
        self.A = -torch.rand(shape.num_heads, generator=generator).mul(3).exp()
        self.D, self.dt_bias = torch.randn(2, shape.num_heads, generator=generator)
        state_len = shape.conv_width - 1 + MAX_DRAFTS
        slots = (state_len, shape.conv_dim) if layout == "SD" else (shape.conv_dim, state_len)
        self.conv_state = torch.full((NUM_BLOCKS, *slots), torch.nan, dtype=dtype)
        state = (shape.num_heads, shape.head_dim, shape.d_state)
        self.temporal_state = torch.full((NUM_BLOCKS, *state), torch.nan, dtype=temporal_dtype)
        for name, value in list(vars(self).items()):
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(self.device))

    def run(self, rows: list[Row], source: random.Random | None = None) -> list[torch.Tensor]:
        """Outputs [q, heads, head_dim] by row. With a source, rows lie in random places among padding."""
        s, source = self.shape, source or random.Random(0)
        order = list(range(len(rows)))
        source.shuffle(order)
        starts, num_tokens = [0] * len(rows), source.randint(0, 2)
        for i in order:
            starts[i] = num_tokens
            num_tokens += len(rows[i].xbc) + source.randint(0, 2)
        wide = torch.full((num_tokens, 3 + s.conv_dim + s.num_heads), 7.0, dtype=self.dtype)  # what in_proj returns
        state_block = torch.full((num_tokens,), -1, dtype=torch.int32)
        for row, start in zip(rows, starts, strict=True):
            tokens = slice(start, start + len(row.xbc))
            wide[tokens, 3 : 3 + s.conv_dim], wide[tokens, 3 + s.conv_dim :] = row.xbc, row.dt
            for token, block in row.keep.items():
                state_block[start + token] = block
        inert = source.randint(0, 2)

        def column(values, padding: int) -> torch.Tensor:
            return torch.tensor([int(v) for v in values] + [padding] * inert, dtype=torch.int32, device=self.device)

        batch = MambaRows(
            query_start=column(starts, num_tokens),
            query_len=column([len(row.xbc) for row in rows], 0),
            max_query_len=max(len(row.xbc) for row in rows) + source.randint(0, 3),
            conv_block=column([row.conv_block for row in rows], 0),
            conv_offset=column([row.conv_offset for row in rows], 0),
            temporal_block=column([row.temporal_block for row in rows], 0),
            is_decode=column([row.is_decode for row in rows], 0),
            state_block=state_block.to(self.device),
            all_decode=all(row.is_decode for row in rows),
            deferral=deferral_of(rows, column),
        )
        wide = wide.to(self.device)
        xbc, dt = wide[:, 3 : 3 + s.conv_dim], wide[:, 3 + s.conv_dim :]
        bias = None if self.plain_conv else self.conv_bias
        xbc = self.conv(xbc, self.conv_state, self.conv_weight, bias, batch, self.layout, not self.plain_conv)
        assert xbc.dtype == self.dtype
        y = self.scan(
            xbc[:, : s.num_heads * s.head_dim].unflatten(1, (s.num_heads, -1)),
            dt,
            *self.split(xbc)[1:],
            self.A,
            self.D,
            self.dt_bias,
            DT_MIN,
            self.temporal_state,
            batch,
        )
        y = y.cpu()
        return [y[start : start + len(row.xbc)] for row, start in zip(rows, starts, strict=True)]

    def conv(self, *arguments) -> torch.Tensor:
        if self.path == "triton":
            return with_kernels(causal_conv1d).causal_conv1d_varlen_triton(*arguments)
        if self.path == "cpu":
            return causal_conv1d.causal_conv1d_varlen(*arguments)
        return causal_conv1d.causal_conv1d_varlen_reference(*arguments)

    def scan(self, *arguments) -> torch.Tensor:
        if self.by_chunks and self.path == "triton":
            tiles = TILES._replace(chunk=self.chunk)
            return with_kernels(mamba2_chunk_scan).mamba2_chunk_scan_varlen_triton(*arguments, tiles=tiles)
        if self.by_chunks:
            return mamba2_chunk_scan.mamba2_chunk_scan_varlen(*arguments)
        if self.path == "triton":
            return with_kernels(mamba2_scan_triton).mamba2_scan_varlen_triton(*arguments)
        if self.path == "cpu":
            return mamba2_scan.mamba2_scan_varlen(*arguments)
        return mamba2_scan.mamba2_scan_varlen_reference(*arguments)

    def split(self, xbc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        s = self.shape
        bc_width = s.num_groups * s.d_state
        x, B, C = xbc.split([s.num_heads * s.head_dim, bc_width, bc_width], dim=-1)
        return x.unflatten(1, (s.num_heads, -1)), B.unflatten(1, (s.num_groups, -1)), C.unflatten(1, (s.num_groups, -1))

    def naive(self, xbc: torch.Tensor, dt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The formulas in fp64, a token at a time: y [T, heads, head_dim] and the last state."""
        s = self.shape
        taps, bias = self.conv_weight.cpu().double(), self.conv_bias.cpu()
        A, D, dt_bias = self.A.cpu(), self.D.cpu(), self.dt_bias.cpu()
        padded = F.pad(xbc.double(), (0, 0, s.conv_width - 1, 0))
        windows = padded.unfold(0, s.conv_width, 1)  # [T, dim, W]
        sums = (windows * taps.t()).sum(-1)
        x, B, C = self.split(sums if self.plain_conv else F.silu(sums + bias))
        per_group = s.num_heads // s.num_groups
        B, C = B.repeat_interleave(per_group, 1), C.repeat_interleave(per_group, 1)
        dt = F.softplus(dt.double() + dt_bias).clamp(min=DT_MIN)
        state, outputs = torch.zeros(s.num_heads, s.head_dim, s.d_state, dtype=torch.float64), []
        for t in range(len(x)):
            update = (dt[t, :, None] * x[t])[..., None] * B[t, :, None]
            state = torch.exp(dt[t] * A)[:, None, None] * state + update
            outputs.append((state * C[t, :, None]).sum(-1) + D[:, None] * x[t])
        return torch.stack(outputs), state

    def run_whole(self, xbc: torch.Tensor, dt: torch.Tensor, block_id: int = NUM_BLOCKS - 1) -> torch.Tensor:
        return self.run([Row(xbc, dt, block_id, keep={len(xbc) - 1: block_id})])[0]

    def slots(self, block: int) -> torch.Tensor:
        """[state_len, dim]"""
        state = self.conv_state[block].cpu()
        return state if self.layout == "SD" else state.t()


def inputs(shape: Shape, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    xbc = torch.randn(num_tokens, shape.conv_dim, generator=generator)
    return xbc, torch.randn(num_tokens, shape.num_heads, generator=generator)


def check_values(layer: Layer, num_tokens: int) -> None:
    xbc, dt = inputs(layer.shape, num_tokens, seed=0)
    want, state = layer.naive(xbc, dt)
    scale = want.abs().max()
    got = layer.run_whole(xbc, dt, block_id=3)
    torch.testing.assert_close(got / scale, (want / scale).float(), **tolerance("kernel", torch.float32))
    torch.testing.assert_close(layer.temporal_state[3].cpu(), state.float(), **tolerance("kernel", torch.float32))
    window = layer.shape.conv_width - 1
    assert torch.equal(layer.slots(3)[:window], xbc[num_tokens - window :])


@EVERYWHERE
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: Shape, path: str) -> None:
    check_values(Layer(shape, path), 70)


def deferral_of(rows: list, column: Callable[[Iterable, int], torch.Tensor]) -> Deferral:
    """Of rows with `is_deferring` and `replays`. column(values, padding) -> int32, inert rows included."""
    blocks = [column([(row.replays + [0] * MAX_DRAFTS)[i] for row in rows], 0) for i in range(MAX_DRAFTS)]
    of_rows = (column([row.is_deferring for row in rows], 0), column([len(row.replays) for row in rows], 0))
    return Deferral(*of_rows, torch.stack(blocks, 1))


def check_plain_conv(path: str, layout: str, lengths: list[int]) -> None:
    new_layer = partial(Layer, Shape(2, 1, 2, 3, 3), path, layout, plain_conv=True)
    check_values(new_layer(), 8)
    check_schedule(new_layer(), lengths, seed=0)


@dataclass
class Text:
    xbc: torch.Tensor
    dt: torch.Tensor
    prompt: int
    columns: list[int]
    num_computed: int = 0
    num_accepted: int = 1
    has_deferred: bool = False  # in its last step
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_decode(self) -> bool:
        return self.num_computed >= self.prompt

    def step(self, source: random.Random, spare: list[int], may_defer: bool) -> tuple[Row, int]:
        """The next step, and how many of its tokens will be final; the other inputs are noise."""
        rest = slice(self.num_computed, None)
        xbc, dt, running = self.xbc[rest], self.dt[rest], self.columns[0]
        if not self.is_decode:
            q = min(source.choice((1, 2, 3, 4, 16, 17, 50)), len(xbc))
            boundaries = {source.randrange(q): spare.pop() for _ in range(source.randint(0, 2))}
            keep = {**boundaries, q - 1: running}
            return Row(xbc[:q], dt[:q], running, running if self.num_computed else -1, keep=keep), q
        q = min(source.randint(1, 1 + MAX_DRAFTS), len(xbc))
        final = source.randint(1, q)
        xbc, dt = xbc[:q].clone(), dt[:q].clone()
        xbc[final:], dt[final:] = 1e3, 1e3
        bias = self.num_accepted - 1
        keep, (live, replays) = dict(enumerate(self.columns[:q])), where_live(self)
        self.has_deferred = may_defer and source.random() < 0.7
        return Row(xbc, dt, running, live, bias, True, keep, self.has_deferred, replays), final


def where_live(text) -> tuple[int, list[int]]:
    """The block of the state that a text's next step starts from, and those of drafts that it runs again."""
    kept = text.columns[: text.num_accepted]
    return (kept[0], kept[1:]) if text.has_deferred else (kept[-1], [])


def check_schedule(layer: Layer, lengths: list[int], seed: int) -> None:
    """Texts in random pieces give the bits that each gives alone and whole; blocks of nobody are not touched."""
    source = random.Random(seed)
    free = list(range(1, NUM_BLOCKS - 1))
    source.shuffle(free)
    texts, boundary_blocks = [], [free.pop() for _ in range(20)]
    for i, length in enumerate(lengths):
        columns = [free.pop() for _ in range(1 + MAX_DRAFTS)]
        texts.append(Text(*inputs(layer.shape, length, seed=i), source.randint(1, length), columns))
    while waiting := [text for text in texts if text.num_computed < len(text.xbc)]:
        chosen = source.sample(waiting, source.randint(1, len(waiting)))
        spare = boundary_blocks[:]
        steps = [text.step(source, spare, has_room_for_inputs(layer.temporal_state)) for text in chosen]
        for text, (_, final), y in zip(chosen, steps, layer.run([row for row, _ in steps], source), strict=True):
            text.outputs.append(y[:final])
            text.num_accepted = final if text.is_decode else 1
            text.num_computed += final
    for text in texts:
        assert torch.equal(torch.cat(text.outputs), layer.run_whole(text.xbc, text.dt)), (layer.layout, seed)
    untouched = [0, *free]
    assert layer.conv_state[untouched].isnan().all() and layer.temporal_state[untouched].isnan().all()


@EVERYWHERE
@LAYOUTS
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_pieces_batch_or_drafts(shape: Shape, layout: str, path: str) -> None:
    for seed in range(3):
        check_schedule(Layer(shape, path, layout), [1, 2, 3, 15, 16, 40, 63], seed)


@EVERYWHERE
@LAYOUTS
def test_a_conv_without_bias_and_silu(layout: str, path: str) -> None:
    check_plain_conv(path, layout, [1, 2, 3, 15, 16, 40, 63])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_bits_of_16_bit_states_and_inputs(shape: Shape, dtype: torch.dtype) -> None:
    check_schedule(Layer(shape, "cpu", "DS", temporal_dtype=dtype), [1, 2, 15, 40], seed=0)
    check_schedule(Layer(shape, "cpu", "SD", dtype=dtype), [1, 2, 15, 40], seed=0)


def check_boundaries(layer: Layer, has_state: bool) -> None:
    """Also those within W-1 tokens of the piece's start, whose conv window reaches into the old one."""
    xbc, dt = inputs(layer.shape, 30, seed=0)
    whole = layer.run_whole(xbc, dt)
    first = 4 if has_state else 0
    if has_state:
        layer.run([Row(xbc[:4], dt[:4], 1, keep={3: 1})])
    other = Row(*inputs(layer.shape, 9, seed=1), conv_block=2, keep={8: 2})
    kept = {1: 10, 2: 11, 3: 12, 17: 13, 30 - first: 1}
    keep = {m - 1: block for m, block in kept.items()}
    layer.run([other, Row(xbc[first:], dt[first:], 1, 1 if has_state else -1, keep=keep)])
    for m, block in kept.items():
        at = first + m
        window = layer.slots(block)[: layer.shape.conv_width - 1].clone()
        padded = F.pad(xbc, (0, 0, layer.shape.conv_width - 1, 0))
        assert torch.equal(window, padded[at : at + len(window)])
        if at < 30:
            assert torch.equal(layer.run([Row(xbc[at:], dt[at:], block, block, keep={0: block})])[0], whole[at:])


@EVERYWHERE
@LAYOUTS
@pytest.mark.parametrize("has_state", [False, True])
def test_boundaries_get_the_state_after_exactly_their_tokens(layout: str, has_state: bool, path: str) -> None:
    for shape in SMALL_SHAPES:
        check_boundaries(Layer(shape, path, layout), has_state)


def check_decode_slots(layer: Layer) -> None:
    """Slot i holds the input of position n - (W-2) + i; slots past the last input are not written."""
    (xbc, dt), columns = inputs(layer.shape, 20, seed=0), list(range(1, 9))
    layer.run([Row(xbc[:10], dt[:10], 1, keep={9: 1})])
    keep = dict(enumerate(columns[:5]))
    layer.run([Row(xbc[10:15], dt[10:15], 1, 1, is_decode=True, keep=keep)])  # of which 3 are accepted
    keep = dict(enumerate(columns[:2]))
    layer.run([Row(xbc[13:15], dt[13:15], 1, 3, conv_offset=2, is_decode=True, keep=keep)])
    slots = layer.slots(1)
    assert torch.equal(slots[:4], xbc[11:15])  # n = 13: positions 11, 12 kept, then 13, 14
    assert slots[7:].isnan().all()  # the first decode step wrote slots 0 .. 6


@EVERYWHERE
@LAYOUTS
def test_slots_of_a_decode_row_hold_the_inputs_that_the_rule_names(layout: str, path: str) -> None:
    check_decode_slots(Layer(SHAPES[1], path, layout))


@EVERYWHERE
def test_steps_without_rows(path: str) -> None:
    """Nothing but inert rows and padding, or no token at all: states stay as they are."""
    layer = Layer(SHAPES[1], path)
    layer.run([Row(*inputs(layer.shape, 0, seed=0), conv_block=1, temporal_block=1)])
    assert layer.conv_state.isnan().all() and layer.temporal_state.isnan().all()


def test_threads_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    paged_rows = pytest.importorskip("mambalign.kernels.cpu.paged_rows")
    shape = replace(SHAPES[1], num_heads=9, num_groups=3)
    xbc, dt = inputs(shape, 50, seed=0)
    alone, shared = Layer(shape, "cpu"), Layer(shape, "cpu")
    want = alone.run_whole(xbc, dt)
    monkeypatch.setattr(paged_rows, "SHARED_ABOVE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(shared.run_whole(xbc, dt), want)
    assert torch.equal(shared.conv_state.nan_to_num(), alone.conv_state.nan_to_num())
    assert torch.equal(shared.temporal_state.nan_to_num(), alone.temporal_state.nan_to_num())


def test_exp_of_the_cpu_kernels() -> None:
    conv = pytest.importorskip("mambalign.kernels.cpu.conv")
    x = torch.linspace(-80, 80, 100_001)
    out = torch.empty_like(x)
    conv._silu(x.numpy(), out.numpy())
    want = F.silu(x.double())
    assert ((out - want).abs() <= 4e-7 * want.abs() + 1e-37).all()


@INTERPRETED
@LAYOUTS
def test_triton_values_and_bits(layout: str) -> None:
    for shape in SHAPES if DEVICE == "cuda" else [Shape(2, 10, 1, 12, 4), Shape(2, 3, 2, 5, 2)]:
        check_values(Layer(shape, "triton", layout), 8)
        check_schedule(Layer(shape, "triton", layout), [1, 9], seed=0)
    check_boundaries(Layer(Shape(1, 5, 1, 6, 4), "triton", layout), has_state=layout == "SD")
    check_decode_slots(Layer(Shape(1, 5, 1, 6, 4), "triton", layout))
    check_plain_conv("triton", layout, [1, 9])


@INTERPRETED
def test_triton_in_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, channels, kept tokens and rows of a state in several tiles: the bits of a single one."""
    shape = Shape(1, 8, 1, 6, 4)
    xbc, dt = inputs(shape, 11, seed=0)
    conv, scan = with_kernels(causal_conv1d), with_kernels(mamba2_scan_triton)
    wide_conv = Layer(shape, "triton").run_whole(xbc, dt)
    for name, value in {"BLOCK_T": 4, "BLOCK_C": 8, "BLOCK_KEPT": 4}.items():
        monkeypatch.setattr(conv, name, value)
    monkeypatch.setattr(scan, "tile_of", lambda *_: (4, 2))
    layer = Layer(shape, "triton", "DS")
    keep = {0: 3, 5: 4, 6: 5, 10: 1}
    assert torch.equal(layer.run([Row(xbc, dt, 1, keep=keep)])[0], wide_conv)
    keep = {i: 6 + i for i in range(4)}
    again = layer.run([Row(xbc[7:], dt[7:], 5, 5, is_decode=True, keep=keep)])[0]
    assert torch.equal(again, wide_conv[7:])
    for token, block in {0: 3, 5: 4}.items():
        assert torch.equal(layer.slots(block)[:3], F.pad(xbc, (0, 0, 2, 0))[token : token + 3])


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_16_bit(dtype: torch.dtype) -> None:
    """Inputs and states of 16 bits: the same bits in pieces, and near the reference."""
    shape = Shape(2, 4, 1, 6, 4)
    check_schedule(Layer(shape, "triton", "SD", temporal_dtype=dtype, dtype=dtype), [1, 9], seed=0)
    xbc, dt = inputs(shape, 20, seed=0)
    xbc, dt = xbc.to(dtype), dt.to(dtype)
    want = Layer(shape, "reference", dtype=dtype).run_whole(xbc, dt)
    got = Layer(shape, "triton", dtype=dtype).run_whole(xbc, dt)
    scale = want.abs().max()
    torch.testing.assert_close(got / scale, want / scale, **tolerance("kernel", torch.bfloat16))


def check_chunks(layer: Layer, chunk: int, num_tokens: int) -> None:
    """Values of the recurrence; bits that do not depend on cuts, on the batch or on what follows in a chunk."""
    xbc, dt = inputs(layer.shape, num_tokens, seed=0)
    other = Row(*inputs(layer.shape, chunk + 3, seed=1), conv_block=2)
    kept = {chunk - 1: 5, num_tokens - 1: 1}
    y = layer.run([other, Row(xbc, dt, 1, keep=kept)], random.Random(0))[1]
    want, state = layer.naive(xbc, dt)
    scale = want.abs().max()
    near = tolerance("kernel", torch.float32 if layer.dtype == torch.float32 else torch.bfloat16)
    torch.testing.assert_close(y / scale, (want / scale).float(), **near)
    if layer.dtype == torch.float32:
        torch.testing.assert_close(layer.temporal_state[1].cpu(), state.float(), **tolerance("kernel", torch.float32))

    assert torch.equal(layer.run([Row(xbc[chunk:], dt[chunk:], 5, 5)])[0], y[chunk:])
    assert torch.equal(layer.run([Row(xbc[: chunk + 1], dt[: chunk + 1], 3)])[0], y[: chunk + 1])
    layer.run([Row(xbc[:chunk], dt[:chunk], 4, keep={chunk - 1: 4})])
    last = Row(xbc[chunk:], dt[chunk:], 4, 4, keep={num_tokens - chunk - 1: 4})
    assert torch.equal(layer.run([last, other])[0], y[chunk:])
    assert torch.equal(layer.temporal_state[4], layer.temporal_state[1])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks(shape: Shape, num_threads: int) -> None:
    with threads(num_threads):
        check_chunks(Layer(shape, "cpu", by_chunks=True), CHUNK, 2 * CHUNK + 5)


# The interpreter multiplies matrices of bfloat16 as integers.
@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16])
def test_triton_chunks(dtype: torch.dtype) -> None:
    shapes, chunk = [Shape(2, 10, 1, 12, 4), Shape(4, 16, 2, 20, 4), Shape(2, 40, 1, 20, 4)], 16
    if DEVICE == "cuda":
        shapes, chunk = SHAPES, CHUNK
    for shape in shapes:
        check_chunks(Layer(shape, "triton", dtype=dtype, by_chunks=True, chunk=chunk), chunk, 2 * chunk + 5)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mambalign.kernels import causal_conv1d as conv, mamba2_chunk_scan as chunks, mamba2_scan_triton as scan

FP32 = ("p_weight", "p_bias", "p_A", "p_D", "p_dt_bias", "p_dt", "p_decay", "p_BC", "p_temporal_state")
INTS = ("query_start", "query_len", "conv_block", "conv_offset", "temporal_block", "is_decode", "state_block")
INTS += ("is_deferring", "num_replays", "replay_block")

def build(kernel, kind, constants, num_warps=4):
    kinds = dict.fromkeys(FP32, "*fp32") | {"p_" + name: "*i32" for name in INTS}
    kinds |= {"dt_min": "fp32", "num_spec_tokens": "i32"}
    if kernel is scan.mamba2_scan_kernel or kernel is chunks.mamba2_chunk_scan_kernel:
        kinds["p_y"] = "*fp32"
    names = kernel.arg_names
    constants = {name: value for name, value in (constants | {"PDL": True}).items() if name in names}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "*" + kind) for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    print(kernel.__name__, kind, built.asm["ptx"].count("shfl.sync"), "shuffles", len(built.asm["cubin"]))

for kind, heads, head_dim, groups, d_state in (("bf16", 128, 64, 8, 128), ("fp32", 8, 64, 2, 64)):
    width, bc = heads * head_dim, groups * d_state
    dim = width + 2 * bc
    sizes = {"X_STRIDE": width + dim + heads, "DIM": dim, "WINDOW": 3, "HAS_BIAS": True, "HAS_SILU": True}
    sizes |= {"BLOCK_T": conv.BLOCK_T, "BLOCK_C": conv.BLOCK_C, "BLOCK_KEPT": conv.BLOCK_KEPT, "BLOCK_STRIDE": 6 * dim}
    for slot, channel in ((dim, 1), (1, 6)):
        layout = sizes | {"SLOT_STRIDE": slot, "CHANNEL_STRIDE": channel}
        for more in ({"LEAVES_INPUTS": False}, {}, {"WINDOW": 2, "HAS_BIAS": False, "HAS_SILU": False}):
            build(conv.causal_conv1d_kernel, kind, layout | {"LEAVES_INPUTS": True} | more)
        build(conv.leave_conv_inputs_kernel, kind, layout)
    sizes = {"X_STRIDE": dim, "BC_STRIDE": dim, "DT_STRIDE": width + dim + heads, "NUM_HEADS": heads}
    sizes |= {"NUM_GROUPS": groups, "GROUP_HEADS": heads // groups, "HEAD_DIM": head_dim, "D_STATE": d_state}
    sizes |= {"BC_WIDTH": bc, "BLOCK_H": heads, "BLOCK_N": bc, "BLOCK_I": d_state // 4}
    build(scan.scan_inputs_kernel, kind, sizes)
    rows, _ = scan.tile_of(head_dim, d_state, scan.MAMBA2_ELEMENTS)
    build(scan.mamba2_scan_kernel, kind, sizes | {"BLOCK_P": rows}, scan.NUM_WARPS)
    if kind == "bf16":
        tiles = chunks.TILES
        sizes |= {"CHUNK": tiles.chunk, "PARTS": tiles.parts, "BLOCK_P": head_dim // tiles.parts, "BLOCK_N": d_state}
        sizes |= {"NUM_STAGES": tiles.num_stages}
        build(chunks.mamba2_chunk_scan_kernel, kind, sizes, tiles.num_warps)
"""


def test_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    """Also: two tokens of an 8B model's scan take 12 shuffles, as three do for each row that a thread shares."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shuffles") == 21
    assert "mamba2_scan_kernel bf16 12 shuffles" in done.stdout
