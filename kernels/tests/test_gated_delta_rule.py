"""The gated delta rule over paged states: values of the formula, and the same bits in any pieces, batch and drafts.

Texts are run side by side in random pieces, by the torch reference, by the CPU kernel and by the Triton kernel
(compiled on a GPU, else interpreted). Pools are poisoned with NaN and blocks are handed out in random order, so that a
read of what was not written, or of a rejected draft, shows in the output.
"""

import os
import random
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from mambalign.kernels import gated_delta_rule, gated_delta_rule_triton
from mambalign.kernels.rows import MambaRows
from mambalign.kernels.scan_tiles import has_room_for_inputs
from mambalign.kernels.tests.test_conv_and_scan_varlen import (
    DEVICE,
    INTERPRETED,
    MAX_DRAFTS,
    deferral_of,
    where_live,
    with_kernels,
)
from mambalign.kernels.tolerances import tolerance

NUM_BLOCKS = 150
EVERYWHERE = pytest.mark.parametrize("path", ["reference", "cpu"])


@dataclass(frozen=True)
class Shape:
    key_heads: int
    heads: int
    k_dim: int
    v_dim: int

    @property
    def widths(self) -> list[int]:
        """Of q, k, v, a and b, as they lie side by side."""
        key_width = self.key_heads * self.k_dim
        return [key_width, key_width, self.heads * self.v_dim, self.heads, self.heads]


SHAPES = [Shape(2, 4, 64, 64), Shape(3, 6, 10, 12), Shape(1, 5, 7, 9), Shape(2, 2, 128, 48), Shape(2, 6, 16, 1)]
SMALL_SHAPES = SHAPES[1:3]


@dataclass
class Row:
    """One row of a step: its inputs [q, width], where its state is, and where states are to be left."""

    inputs: torch.Tensor
    block: int = -1
    is_decode: bool = False
    keep: dict[int, int] = field(default_factory=dict)  # token of the row -> block
    is_deferring: bool = False
    replays: list[int] = field(default_factory=list)  # blocks of drafts that the last step deferred, and were kept


class Layer:
    """Random weights of one mixer between its conv and its norm, and a pool for its states."""

    def __init__(self, shape: Shape, path: str, dtype=torch.float32, temporal_dtype=torch.float32):
        generator = torch.Generator().manual_seed(sum(shape.widths))
        self.shape, self.path, self.dtype = shape, path, dtype
        self.device = DEVICE if path == "triton" else "cpu"
        self.A = -torch.rand(shape.heads, generator=generator).mul(2).exp().to(self.device)
        self.dt_bias = (torch.randn(shape.heads, generator=generator) - 2).to(self.device)
        state = (NUM_BLOCKS, shape.heads, shape.v_dim, shape.k_dim)
        self.states = torch.full(state, torch.nan, dtype=temporal_dtype, device=self.device)

    def run(self, rows: list[Row], source: random.Random | None = None) -> list[torch.Tensor]:
        """Outputs [q, heads, v_dim] by row; rows lie in random places among padding and inert rows."""
        source = source or random.Random(0)
        order = list(range(len(rows)))
        source.shuffle(order)
        starts, num_tokens = [0] * len(rows), source.randint(0, 2)
        for i in order:
            starts[i] = num_tokens
            num_tokens += len(rows[i].inputs) + source.randint(0, 2)
        wide = torch.full((num_tokens, 3 + sum(self.shape.widths)), 7.0, dtype=self.dtype)
        state_block = torch.full((num_tokens,), -1, dtype=torch.int32)
        for row, start in zip(rows, starts, strict=True):
            wide[start : start + len(row.inputs), 3:] = row.inputs
            for token, block in row.keep.items():
                state_block[start + token] = block
        inert = source.randint(0, 2)

        def column(values, padding: int) -> torch.Tensor:
            return torch.tensor([int(v) for v in values] + [padding] * inert, dtype=torch.int32, device=self.device)

        batch = MambaRows(
            query_start=column(starts, num_tokens),
            query_len=column([len(row.inputs) for row in rows], 0),
            max_query_len=max(len(row.inputs) for row in rows) + source.randint(0, 3),
            conv_block=column([0] * len(rows), 0),
            conv_offset=column([0] * len(rows), 0),
            temporal_block=column([row.block for row in rows], 0),
            is_decode=column([row.is_decode for row in rows], 0),
            state_block=state_block.to(self.device),
            all_decode=all(row.is_decode for row in rows),
            deferral=deferral_of(rows, column),
        )
        o = self.rule(*self.split(wide.to(self.device)[:, 3:]), self.A, self.dt_bias, self.states, batch).cpu()
        return [o[start : start + len(row.inputs)] for row, start in zip(rows, starts, strict=True)]

    def rule(self, *arguments) -> torch.Tensor:
        if self.path == "triton":
            return with_kernels(gated_delta_rule_triton).gated_delta_rule_varlen_triton(*arguments)
        if self.path == "cpu":
            return gated_delta_rule.gated_delta_rule_varlen(*arguments)
        return gated_delta_rule.gated_delta_rule_varlen_reference(*arguments)

    def split(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        s = self.shape
        q, k, v, a, b = inputs.split(s.widths, dim=1)
        q, k, v = q.unflatten(1, (s.key_heads, -1)), k.unflatten(1, (s.key_heads, -1)), v.unflatten(1, (s.heads, -1))
        return [q, k, v, a, b]

    def naive(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The formula as it is written, in fp64, a token at a time: o [T, heads, v_dim] and the last state."""
        s = self.shape
        q, k, v, a, b = self.split(inputs.double())
        q, k = (F.normalize(t, dim=-1).repeat_interleave(s.heads // s.key_heads, 1) for t in (q, k))
        decay = torch.exp(F.softplus(a + self.dt_bias.cpu()) * self.A.cpu())
        state, outputs = torch.zeros(s.heads, s.v_dim, s.k_dim, dtype=torch.float64), []
        for t in range(len(inputs)):
            state = state * decay[t, :, None, None]
            missing = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
            state = state + torch.einsum("hv,hk->hvk", b[t].sigmoid()[:, None] * missing, k[t])
            outputs.append(torch.einsum("hvk,hk->hv", state, q[t]) / s.k_dim**0.5)
        return torch.stack(outputs), state

    def run_whole(self, inputs: torch.Tensor, block: int = NUM_BLOCKS - 1) -> torch.Tensor:
        return self.run([Row(inputs, keep={len(inputs) - 1: block})])[0]


def random_inputs(shape: Shape, num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, sum(shape.widths), generator=torch.Generator().manual_seed(seed))


def check_values(layer: Layer, num_tokens: int) -> None:
    inputs = random_inputs(layer.shape, num_tokens, seed=0)
    o, state = layer.naive(inputs)
    torch.testing.assert_close(layer.run_whole(inputs, 3), o.float(), **tolerance("kernel", torch.float32))
    torch.testing.assert_close(layer.states[3].cpu(), state.float(), **tolerance("kernel", torch.float32))


@EVERYWHERE
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: Shape, path: str) -> None:
    check_values(Layer(shape, path), 70)


@dataclass
class Text:
    inputs: torch.Tensor
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
        inputs, running = self.inputs[self.num_computed :], self.columns[0]
        if not self.is_decode:
            q = min(source.choice((1, 2, 3, 4, 16, 17, 50)), len(inputs))
            boundaries = {source.randrange(q): spare.pop() for _ in range(source.randint(0, 2))}
            return Row(inputs[:q], running if self.num_computed else -1, keep={**boundaries, q - 1: running}), q
        q = min(source.randint(1, 1 + MAX_DRAFTS), len(inputs))
        final = source.randint(1, q)
        inputs = inputs[:q].clone()
        inputs[final:] = 1e3
        live, replays = where_live(self)
        self.has_deferred = may_defer and source.random() < 0.7
        return Row(inputs, live, True, dict(enumerate(self.columns[:q])), self.has_deferred, replays), final


def check_schedule(layer: Layer, lengths: list[int], seed: int) -> None:
    """Texts in random pieces give the bits that each gives alone and whole; blocks of nobody are not touched."""
    source = random.Random(seed)
    free = list(range(1, NUM_BLOCKS - 1))
    source.shuffle(free)
    texts, boundary_blocks = [], [free.pop() for _ in range(20)]
    for i, length in enumerate(lengths):
        columns = [free.pop() for _ in range(1 + MAX_DRAFTS)]
        texts.append(Text(random_inputs(layer.shape, length, seed=i), source.randint(1, length), columns))
    while waiting := [text for text in texts if text.num_computed < len(text.inputs)]:
        chosen = source.sample(waiting, source.randint(1, len(waiting)))
        spare = boundary_blocks[:]
        steps = [text.step(source, spare, has_room_for_inputs(layer.states)) for text in chosen]
        for text, (_, final), o in zip(chosen, steps, layer.run([row for row, _ in steps], source), strict=True):
            text.outputs.append(o[:final])
            text.num_accepted = final if text.is_decode else 1
            text.num_computed += final
    for text in texts:
        assert torch.equal(torch.cat(text.outputs), layer.run_whole(text.inputs)), seed
    assert layer.states[[0, *free]].isnan().all()


@EVERYWHERE
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_pieces_batch_or_drafts(shape: Shape, path: str) -> None:
    for seed in range(3 if path == "cpu" else 1):
        check_schedule(Layer(shape, path), [1, 2, 3, 15, 16, 40, 63], seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_of_16_bit_states_and_inputs(dtype: torch.dtype) -> None:
    for shape in SMALL_SHAPES:
        check_schedule(Layer(shape, "cpu", temporal_dtype=dtype), [1, 2, 15, 40], seed=0)
        check_schedule(Layer(shape, "cpu", dtype=dtype), [1, 2, 15, 40], seed=0)


def check_boundaries(layer: Layer) -> None:
    inputs = random_inputs(layer.shape, 30, seed=0)
    whole = layer.run_whole(inputs)
    other = Row(random_inputs(layer.shape, 9, seed=1), keep={8: 2})
    kept = {1: 10, 2: 11, 17: 13, 30: 1}
    layer.run([other, Row(inputs, keep={m - 1: block for m, block in kept.items()})])
    for m, block in kept.items():
        if m < 30:
            assert torch.equal(layer.run([Row(inputs[m:], block, keep={0: block})])[0], whole[m:])


@EVERYWHERE
def test_boundaries_get_the_state_after_exactly_their_tokens(path: str) -> None:
    for shape in SMALL_SHAPES:
        check_boundaries(Layer(shape, path))


@EVERYWHERE
def test_steps_without_rows(path: str) -> None:
    """Nothing but inert rows and padding: states stay as they are."""
    layer = Layer(SHAPES[1], path)
    layer.run([Row(random_inputs(layer.shape, 0, seed=0), block=1)])
    assert layer.states.isnan().all()


def test_threads_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    paged_rows = pytest.importorskip("mambalign.kernels.cpu.paged_rows")
    shape = Shape(3, 9, 12, 10)
    inputs = random_inputs(shape, 50, seed=0)
    alone, shared = Layer(shape, "cpu"), Layer(shape, "cpu")
    want = alone.run_whole(inputs)
    monkeypatch.setattr(paged_rows, "SHARED_ABOVE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(shared.run_whole(inputs), want)
    assert torch.equal(shared.states.nan_to_num(), alone.states.nan_to_num())


@INTERPRETED
def test_triton_values_and_bits() -> None:
    for shape in SHAPES if DEVICE == "cuda" else [Shape(1, 3, 12, 10), Shape(2, 2, 5, 3)]:
        check_values(Layer(shape, "triton"), 9)
        check_schedule(Layer(shape, "triton"), [1, 9], seed=0)
    check_boundaries(Layer(Shape(1, 1, 6, 5), "triton"))


@INTERPRETED
def test_triton_in_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a state in several tiles: the bits of a single one."""
    shape = Shape(1, 2, 6, 8)
    inputs = random_inputs(shape, 7, seed=0)
    whole = Layer(shape, "triton").run_whole(inputs)
    monkeypatch.setattr(with_kernels(gated_delta_rule_triton), "tile_of", lambda *_: (4, 2))
    assert torch.equal(Layer(shape, "triton").run_whole(inputs), whole)


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_16_bit(dtype: torch.dtype) -> None:
    """Inputs and states of 16 bits: the same bits in pieces, and near the reference."""
    shape = Shape(1, 2, 6, 4)
    check_schedule(Layer(shape, "triton", dtype, dtype), [1, 9], seed=0)
    inputs = random_inputs(shape, 20, seed=0).to(dtype)
    want, got = (Layer(shape, path, dtype).run_whole(inputs) for path in ("reference", "triton"))
    torch.testing.assert_close(got, want, **tolerance("kernel", torch.float32))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mambalign.kernels import gated_delta_rule_triton as rule

FP32 = ("p_A", "p_dt_bias", "p_kq", "p_gates", "p_qk", "p_o")
INTS = ("query_start", "query_len", "temporal_block", "state_block")
INTS += ("is_deferring", "num_replays", "replay_block")

def build(kernel, kind, state, constants, num_warps):
    kinds = dict.fromkeys(FP32, "*fp32") | {"p_" + name: "*i32" for name in INTS} | {"p_temporal_state": "*" + state}
    kinds["num_spec_tokens"] = "i32"
    names = kernel.arg_names
    constants = {name: value for name, value in (constants | {"PDL": True}).items() if name in names}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "*" + kind) for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    print(kernel.__name__, kind, state, built.asm["ptx"].count("shfl.sync"), "shuffles", len(built.asm["cubin"]))

for kind, keys, heads, k_dim, v_dim in (("bf16", 16, 32, 128, 128), ("fp32", 3, 6, 10, 12)):
    dim, power = 2 * keys * k_dim + heads * v_dim, triton.next_power_of_2
    block_v, block_i = rule.tile_of(v_dim, k_dim, rule.DELTA_ELEMENTS)
    sizes = {"Q_STRIDE": dim, "V_STRIDE": dim, "A_STRIDE": dim + heads * (v_dim + 2), "KEY_HEADS": keys, "HEADS": heads}
    sizes |= {"GROUP": heads // keys, "K_DIM": k_dim, "V_DIM": v_dim, "BLOCK_G": power(heads // keys)}
    sizes |= {"BLOCK_K": power(k_dim), "BLOCK_I": block_i, "BLOCK_V": block_v, "EPS": rule.NORM_EPS}
    build(rule.delta_inputs_kernel, kind, "fp32", sizes, 1)
    for state in ("fp32", "bf16"):
        build(rule.gated_delta_rule_kernel, kind, state, sizes, rule.NUM_WARPS)
"""


def test_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    """Also: three for each product of a row that threads share: two rows, two tokens and one again."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shuffles") == 6, done.stdout
    assert "gated_delta_rule_kernel bf16 fp32 60 shuffles" in done.stdout, done.stdout
