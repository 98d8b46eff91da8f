"""Conv and scan over paged states: values of the formulas, and the same bits in any pieces, batch, layout and drafts.

Texts are run side by side in random pieces. Pools are poisoned with NaN and blocks are handed out in random order, so
that a read of what was not written, or of a rejected draft, shows in the output.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from mambalign.kernels.causal_conv1d import causal_conv1d, plan_causal_conv1d
from mambalign.kernels.mamba2_scan import ROWS_TOGETHER, mamba2_scan, plan_mamba2_scan
from mambalign.kernels.tolerances import tolerance

MAX_DRAFTS = 7
DT_MIN = 1e-3
NUM_BLOCKS = 200


@dataclass
class Boundary:
    row: int
    num_tokens: int
    block_id: int


@dataclass
class Batch:
    """What the kernels read of a `MambaBatch`."""

    query_lens: list[int]
    is_decode: list[bool]
    has_state: list[bool]
    num_accepted: list[int]
    block_table: list[dict[int, int]]
    boundaries: list[Boundary] = field(default_factory=list)

    @property
    def running_column(self) -> list[int]:
        return [min(columns) for columns in self.block_table]


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
    Shape(2, 1, 2, 3, 3),
    Shape(1, 16, 1, 16, 4),
]


class Layer:
    """Random weights of one mixer between its two projections, and pools for its states."""

    def __init__(self, shape: Shape, layout: str = "SD", temporal_dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(shape.conv_dim)
        self.shape, self.layout = shape, layout
        self.conv_weight = torch.randn(shape.conv_width, shape.conv_dim, generator=generator)
        self.conv_bias = torch.randn(shape.conv_dim, generator=generator)
        self.A = -torch.rand(shape.num_heads, generator=generator).mul(3).exp()
        self.D, self.dt_bias = torch.randn(2, shape.num_heads, generator=generator)
        state_len = shape.conv_width - 1 + MAX_DRAFTS
        slots = (state_len, shape.conv_dim) if layout == "SD" else (shape.conv_dim, state_len)
        self.conv_state = torch.full((NUM_BLOCKS, *slots), torch.nan)
        state = (shape.num_heads, shape.head_dim, shape.d_state)
        self.temporal_state = torch.full((NUM_BLOCKS, *state), torch.nan, dtype=temporal_dtype)

    def run(self, xbc: torch.Tensor, dt: torch.Tensor, batch: Batch) -> torch.Tensor:
        """xbc [T, conv_dim], dt [T, heads] -> y [T, heads, head_dim]."""
        s = self.shape
        conv_plan, scan_plan = plan_causal_conv1d(batch, s.conv_width), plan_mamba2_scan(batch)
        xbc = causal_conv1d(xbc, self.conv_state, self.conv_weight, self.conv_bias, conv_plan, self.layout)
        x, B, C = self.split(xbc)
        return mamba2_scan(x, dt, B, C, self.A, self.D, self.dt_bias, DT_MIN, self.temporal_state, scan_plan)

    def split(self, xbc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        s = self.shape
        bc_width = s.num_groups * s.d_state
        x, B, C = xbc.split([s.num_heads * s.head_dim, bc_width, bc_width], dim=-1)
        return x.unflatten(1, (s.num_heads, -1)), B.unflatten(1, (s.num_groups, -1)), C.unflatten(1, (s.num_groups, -1))

    def naive(self, xbc: torch.Tensor, dt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The formulas in fp64, a token at a time: y [T, heads, head_dim] and the last state."""
        s = self.shape
        taps = self.conv_weight.double()
        padded = F.pad(xbc.double(), (0, 0, s.conv_width - 1, 0))
        windows = padded.unfold(0, s.conv_width, 1)  # [T, dim, W]
        x, B, C = self.split(F.silu((windows * taps.t()).sum(-1) + self.conv_bias))
        per_group = s.num_heads // s.num_groups
        B, C = B.repeat_interleave(per_group, 1), C.repeat_interleave(per_group, 1)
        dt = F.softplus(dt.double() + self.dt_bias).clamp(min=DT_MIN)
        state, outputs = torch.zeros(s.num_heads, s.head_dim, s.d_state, dtype=torch.float64), []
        for t in range(len(x)):
            update = (dt[t, :, None] * x[t])[..., None] * B[t, :, None]
            state = torch.exp(dt[t] * self.A)[:, None, None] * state + update
            outputs.append((state * C[t, :, None]).sum(-1) + self.D[:, None] * x[t])
        return torch.stack(outputs), state

    def run_whole(self, xbc: torch.Tensor, dt: torch.Tensor, block_id: int = NUM_BLOCKS - 1) -> torch.Tensor:
        return self.run(xbc, dt, Batch([len(xbc)], [False], [False], [1], [{0: block_id}]))


def inputs(shape: Shape, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    xbc = torch.randn(num_tokens, shape.conv_dim, generator=generator)
    return xbc, torch.randn(num_tokens, shape.num_heads, generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: Shape) -> None:
    layer, (xbc, dt) = Layer(shape), inputs(shape, 70, seed=0)
    want, state = layer.naive(xbc, dt)
    scale = want.abs().max()
    got = layer.run_whole(xbc, dt, block_id=3)
    torch.testing.assert_close(got / scale, (want / scale).float(), **tolerance("kernel", torch.float32))
    torch.testing.assert_close(layer.temporal_state[3], state.float(), **tolerance("kernel", torch.float32))
    assert torch.equal(layer.conv_state[3, : shape.conv_width - 1], xbc[71 - shape.conv_width :])


@dataclass
class Text:
    xbc: torch.Tensor
    dt: torch.Tensor
    prompt: int
    columns: list[int]
    num_computed: int = 0
    num_accepted: int = 1
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_decode(self) -> bool:
        return self.num_computed >= self.prompt

    def step(self, source: random.Random) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Inputs of the next step and how many of its tokens will be final; the other inputs are noise."""
        rest = slice(self.num_computed, None)
        xbc, dt = self.xbc[rest], self.dt[rest]
        if not self.is_decode:
            q = min(source.choice((1, 2, 3, 4, 16, 17, 50)), len(xbc))
            return xbc[:q], dt[:q], q
        q = min(source.randint(1, 1 + MAX_DRAFTS), len(xbc))
        final = source.randint(1, q)
        xbc, dt = xbc[:q].clone(), dt[:q].clone()
        xbc[final:], dt[final:] = 1e3, 1e3
        return xbc, dt, final


def check_schedule(layer: Layer, lengths: list[int], seed: int) -> None:
    source = random.Random(seed)
    free = list(range(1, NUM_BLOCKS - 1))
    source.shuffle(free)
    texts = []
    for i, length in enumerate(lengths):
        columns = [free.pop() for _ in range(1 + MAX_DRAFTS)]
        texts.append(Text(*inputs(layer.shape, length, seed=i), source.randint(1, length), columns))
    while waiting := [text for text in texts if text.num_computed < len(text.xbc)]:
        chosen = source.sample(waiting, source.randint(1, len(waiting)))
        steps = [text.step(source) for text in chosen]
        batch = Batch(
            [len(xbc) for xbc, _, _ in steps],
            [text.is_decode for text in chosen],
            [text.num_computed > 0 for text in chosen],
            [text.num_accepted for text in chosen],
            [dict(enumerate(text.columns)) for text in chosen],
        )
        y = layer.run(torch.cat([s[0] for s in steps]), torch.cat([s[1] for s in steps]), batch)
        for text, (_, _, final), rows in zip(chosen, steps, y.split(batch.query_lens), strict=True):
            text.outputs.append(rows[:final])
            text.num_accepted = final if text.is_decode else 1
            text.num_computed += final
    for text in texts:
        assert torch.equal(torch.cat(text.outputs), layer.run_whole(text.xbc, text.dt)), (layer.layout, seed)
    untouched = [0, *free]
    assert layer.conv_state[untouched].isnan().all() and layer.temporal_state[untouched].isnan().all()


@pytest.mark.parametrize("temporal_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_pieces_batch_or_drafts(shape: Shape, layout: str, temporal_dtype: torch.dtype) -> None:
    for seed in range(3):
        check_schedule(Layer(shape, layout, temporal_dtype), [1, 2, 3, 15, 16, 40, 63], seed)


def test_more_rows_than_run_together() -> None:
    check_schedule(Layer(SHAPES[1]), list(range(1, 2 * ROWS_TOGETHER + 6)), seed=0)


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("has_state", [False, True])
def test_boundaries_get_the_state_after_exactly_their_tokens(layout: str, has_state: bool) -> None:
    """Also those within W-1 tokens of the piece's start, whose conv window reaches into the old one."""
    layer, (xbc, dt) = Layer(SHAPES[1], layout), inputs(SHAPES[1], 30, seed=0)
    whole = layer.run_whole(xbc, dt)
    first = 4 if has_state else 0
    if has_state:
        layer.run(xbc[:4], dt[:4], Batch([4], [False], [False], [1], [{0: 1}]))
    other = inputs(SHAPES[1], 9, seed=1)
    kept = {1: 10, 2: 11, 3: 12, 17: 13, 30 - first: 14}
    batch = Batch([9, 30 - first], [False] * 2, [False, has_state], [1, 1], [{0: 2}, {0: 1}])
    batch.boundaries = [Boundary(1, m, block) for m, block in kept.items()]
    layer.run(torch.cat([other[0], xbc[first:]]), torch.cat([other[1], dt[first:]]), batch)
    for m, block in kept.items():
        at = first + m
        if at < 30:
            rest = layer.run(xbc[at:], dt[at:], Batch([30 - at], [False], [True], [1], [{0: block}]))
            assert torch.equal(rest, whole[at:])
    assert torch.equal(layer.temporal_state[14], layer.temporal_state[1])


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_slots_of_a_decode_row_hold_the_inputs_that_the_rule_names(layout: str) -> None:
    """Slot i holds the input of position n - (W-2) + i; slots past the last input are not written."""
    shape = SHAPES[1]
    layer, (xbc, dt) = Layer(shape, layout), inputs(shape, 20, seed=0)
    table = [dict(enumerate(range(1, 9)))]
    layer.run(xbc[:10], dt[:10], Batch([10], [False], [False], [1], table))
    layer.run(xbc[10:15], dt[10:15], Batch([5], [True], [True], [1], table))  # of which 3 are accepted
    layer.run(xbc[13:15], dt[13:15], Batch([2], [True], [True], [3], table))
    slots = layer.conv_state[1] if layout == "SD" else layer.conv_state[1].t()
    assert torch.equal(slots[:4], xbc[11:15])  # n = 13: positions 11, 12 kept, then 13, 14
    assert slots[7:].isnan().all()  # the first decode step wrote slots 0 .. 6
