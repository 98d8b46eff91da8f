"""The gated delta rule by chunks: values of the recurrence, hard texts too, and bits that no cut or batch changes."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mambalign.kernels import gated_delta_chunk_scan
from mambalign.kernels.chunk_shape import DELTA_CHUNK
from mambalign.kernels.tests import test_gated_delta_rule
from mambalign.kernels.tests.test_conv_and_scan_varlen import DEVICE, INTERPRETED, threads, with_kernels
from mambalign.kernels.tests.test_gated_delta_rule import SHAPES, Row, Shape, random_inputs
from mambalign.kernels.tolerances import tolerance

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies bfloat16 as integers
SMALL_SHAPES = [Shape(1, 2, 10, 12), Shape(2, 2, 20, 40)]  # the second in two tiles
TRITON_SHAPES = [*SHAPES, Shape(2, 4, 128, 128)] if DEVICE == "cuda" else SMALL_SHAPES
TEXTS = ("random", "repeated", "nearly repeated", "alternating", "forgetting")


class ChunkLayer(test_gated_delta_rule.Layer):
    def rule(self, *arguments) -> torch.Tensor:
        if self.path == "triton":
            return with_kernels(gated_delta_chunk_scan).gated_delta_chunk_scan_varlen_triton(*arguments)
        return gated_delta_chunk_scan.gated_delta_chunk_scan_varlen(*arguments)


def make_text(shape: Shape, num_tokens: int, kind: str) -> torch.Tensor:
    """Inputs [T, width]. Keys that (nearly) repeat or change their sign, kept and corrected in full, are the hardest
    for the inverse; a token that forgets everything is for the decays, whose logarithms add up to -1000 and below."""
    inputs = random_inputs(shape, num_tokens, seed=0)
    _, k, _, a, b = inputs.split(shape.widths, dim=1)
    if kind == "forgetting":
        a[::7] = 300.0
    elif kind != "random":
        k[:] = k[:1] + (1e-3 * k if kind == "nearly repeated" else 0.0)
        a[:], b[:] = -20.0, 12.0
    if kind == "alternating":
        k[1::2] *= -1
    return inputs


def check_values(layer: ChunkLayer, num_tokens: int, kind: str) -> None:
    """To the tolerance of the recurrence: in fp32 at most 1e-5 was found, in all of these texts."""
    inputs = make_text(layer.shape, num_tokens, kind)
    o, state = layer.naive(inputs)
    torch.testing.assert_close(layer.run_whole(inputs, 3), o.float(), **tolerance("kernel", torch.float32))
    torch.testing.assert_close(layer.states[3].cpu(), state.float(), **tolerance("kernel", torch.float32))


@pytest.mark.parametrize("kind", TEXTS)
def test_values(kind: str) -> None:
    for shape in SHAPES:
        check_values(ChunkLayer(shape, "cpu"), 3 * DELTA_CHUNK - 5, kind)


@INTERPRETED
@pytest.mark.parametrize("kind", TEXTS)
def test_triton_values(kind: str) -> None:
    for shape in TRITON_SHAPES:
        check_values(ChunkLayer(shape, "triton"), DELTA_CHUNK + 9, kind)


def check_cuts(layer: ChunkLayer, num_tokens: int) -> None:
    """Cut at each chunk, in company or alone, and without what follows in a chunk: the same outputs and states."""
    inputs, chunk, end = random_inputs(layer.shape, num_tokens, seed=0), DELTA_CHUNK, num_tokens - 1
    other = Row(random_inputs(layer.shape, chunk + 3, seed=1), keep={chunk + 2: 2})
    ends = range(chunk, num_tokens, chunk)
    kept = {stop - 1: 10 + i for i, stop in enumerate(ends)}
    _, o = layer.run([other, Row(inputs, keep={**kept, end: 1})], random.Random(0))
    for i, stop in enumerate(ends):
        first = layer.run([Row(inputs[:stop], keep={stop - 1: 5})])[0]
        assert torch.equal(first, o[:stop]) and torch.equal(layer.states[5], layer.states[10 + i])
        rest = Row(inputs[stop:], 5, keep={end - stop: 5})
        assert torch.equal(layer.run([rest, other], random.Random(i))[0], o[stop:])
        assert torch.equal(layer.states[5], layer.states[1])
        short = layer.run([Row(inputs[stop - chunk : stop - 7], 9 + i if i else -1)])[0]
        assert torch.equal(short, o[stop - chunk : stop - 7])
    assert not o.isnan().any() and not layer.states[[1, 2]].isnan().any()
    assert layer.states[[0, 3, 4, *range(10 + len(ends), len(layer.states))]].isnan().all()


@pytest.mark.parametrize(("num_threads", "shapes"), [(1, SHAPES), (2, SHAPES[:2])])
def test_bits_do_not_depend_on_cuts_or_batch(num_threads: int, shapes: list[Shape]) -> None:
    with threads(num_threads):
        for shape in shapes:
            check_cuts(ChunkLayer(shape, "cpu"), 2 * DELTA_CHUNK + 11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_of_16_bit_states_and_inputs(dtype: torch.dtype) -> None:
    check_cuts(ChunkLayer(SHAPES[1], "cpu", temporal_dtype=dtype), 3 * DELTA_CHUNK + 11)
    check_cuts(ChunkLayer(SHAPES[1], "cpu", dtype), 2 * DELTA_CHUNK + 1)


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_triton_bits_do_not_depend_on_cuts_or_batch(dtype: torch.dtype) -> None:
    for shape in TRITON_SHAPES[1:]:
        check_cuts(ChunkLayer(shape, "triton", dtype, dtype), 2 * DELTA_CHUNK + 11)


@INTERPRETED
def test_triton_16_bit() -> None:
    """Inputs and states of 16 bits: near the reference, whose products are of fp32."""
    for shape in TRITON_SHAPES:
        inputs = random_inputs(shape, DELTA_CHUNK + 20, seed=0).to(HALF)
        want, got = (ChunkLayer(shape, path, HALF, HALF) for path in ("cpu", "triton"))
        outputs = want.run_whole(inputs, 3)
        scale = outputs.abs().max()
        near = tolerance("kernel", torch.bfloat16)
        torch.testing.assert_close(got.run_whole(inputs, 3) / scale, outputs / scale, **near)
        torch.testing.assert_close(got.states[3].cpu().float(), want.states[3].float(), **near)


@INTERPRETED
def test_triton_looks_through_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than a program sees at a time, some inert, some of several chunks: each gets what it gets alone."""
    monkeypatch.setattr(with_kernels(gated_delta_chunk_scan), "ROWS_AT_A_TIME", 2)
    shape = Shape(1, 1, 4, 3)
    texts = [random_inputs(shape, n, seed=n) for n in (3, 0, 1, DELTA_CHUNK + 1, 0, 7)]
    together = ChunkLayer(shape, "triton").run([Row(text) for text in texts], random.Random(0))
    for text, o in zip(texts, together, strict=True):
        assert torch.equal(o, ChunkLayer(shape, "triton").run([Row(text)])[0])


@INTERPRETED
def test_wrong_values_are_found_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    module = with_kernels(gated_delta_chunk_scan)
    run = module.gated_delta_chunk_scan_varlen_triton
    sizes = (4, 2, 10, 12, HALF, torch.float32, DEVICE)
    monkeypatch.setattr(module, "gated_delta_chunk_scan_varlen", run)
    assert module.chunks_are_right(*sizes)
    for wrong in (float("nan"), 0.05):

        def faulty(*arguments, wrong=wrong):
            o = run(*arguments)
            o[5, 1] += wrong * o.abs().max()
            return o

        monkeypatch.setattr(module, "gated_delta_chunk_scan_varlen", faulty)
        assert not module.chunks_are_right(*sizes)


@INTERPRETED
@pytest.mark.parametrize("path", ["cpu", "triton"])
def test_steps_without_rows(path: str) -> None:
    layer = ChunkLayer(SHAPES[1], path)
    layer.run([Row(random_inputs(layer.shape, 0, seed=0), block=1)])
    assert layer.states.isnan().all()


def test_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    """At the sizes of a 9B model: products on tensor cores, a chunk's inputs loaded ahead, room for what they take."""
    script = Path(__file__).with_name("compile_for_sm90.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), "delta"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert not answer["failed"] and len(answer["kernels"]) == 5, answer
    for name in ("delta solve", "delta scan", "delta scan of 16 bit"):
        kernel = answer["kernels"][name]
        assert kernel["wgmma"] > 0 and kernel["shared"] <= 227 << 10, (name, kernel)
        assert "scan" not in name or kernel["wide_loads"] > 0, (name, kernel)
