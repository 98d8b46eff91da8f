#!/usr/bin/env python3
"""How fast the kernels of a forward pass are at the sizes of an 8B Nemotron-H, beside the device's limits.

A time is the median of some replays of a CUDA graph of 20 calls, over several copies of a weight or state, so that
nothing comes from the L2 cache. The limit of a call is the larger of its bytes at the measured copy rate and its
operations at 790 TFLOP/s. The first lines are the ceilings; the last is one JSON object. `--tiles` tries other tiles of
a kernel instead; those of linear layers are tried in chains (`bench_chains.py`). Needs a CUDA device.
"""

import argparse
import importlib
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
import triton
from device_times import compile_all, graph_times
from machine_rates import copy_rate

from mambalign.kernels.activation import relu2
from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.draft_head import draft_head_bytes, draft_tokens_triton, quantize_head
from mambalign.kernels.linear_tiles import Tiles
from mambalign.kernels.linear_triton import linear_on_gpu
from mambalign.kernels.mamba2_chunk_scan import TILES, ChunkTiles, mamba2_chunk_scan_varlen_triton
from mambalign.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_gated
from mambalign.kernels.rows import Deferral, MambaRows
from mambalign.kernels.sampling import argmax_rows
from mambalign.kernels.verify_drafts import verify_drafts

DEVICE = "cuda"
HIDDEN, UP, VOCAB, MAMBA_WIDTH, IN_PROJ = 4096, 21504, 131072, 8192, 18560
WEIGHTS = {  # name: (K, N)
    "in_proj": (HIDDEN, IN_PROJ),
    "out_proj": (MAMBA_WIDTH, HIDDEN),
    "up": (HIDDEN, UP),
    "down": (UP, HIDDEN),
    "qkv": (HIDDEN, 6144),
    "o": (HIDDEN, HIDDEN),
    "head": (HIDDEN, VOCAB),
}
ROWS = (1, 4, 32, 128, 256, 512, 8192)
HEAD_ROWS = 512  # most rows of which logits are taken
DRAFT_VOCABS, DRAFT_ROWS = (VOCAB, 248320), (1, 16, 32, 64, 128, 256)  # of a 9B Qwen3.5 too; rows: one a request
HEADS, HEAD_DIM, D_STATE, GROUPS, CONV_DIM, CONV_WIDTH, DRAFTS = 128, 64, 128, 8, 10240, 4, 3
QUERY_HEADS, KV_HEADS, ATTENTION_DIM, KV_BLOCK = 32, 8, 128, 16
DELTA_HEADS, DELTA_KEY_HEADS, DELTA_DIM = 32, 16, 128  # of a 9B Qwen3.5: values, keys, and the width of either
CALLS = 20  # of a graph
LONG_CALLS = 3  # of a graph, of what takes long and leaves much
SHARED_BYTES = 224 << 10  # of a program, for tiles on their way
COLD_BYTES = 256 << 20  # more than the L2 cache holds
TFLOPS = 790.0


class Bench:
    def __init__(self, replays: int):
        self.replays, self.tb_s, self.results = replays, copy_rate(), []

    def limit_us(self, num_bytes: float, num_operations: float = 0) -> float:
        return max(num_bytes / self.tb_s / 1e6, num_operations / TFLOPS / 1e6)

    def report(self, name: str, rows: int, calls: list[Callable[[], object]], limit_us: float, **beside: float) -> None:
        times = graph_times(calls, self.replays)
        us = statistics.median(times)
        line = f"{name:28} {rows:5} rows {us:9.2f} us [{min(times):.2f} .. {max(times):.2f}]"
        line += f"  limit {limit_us:8.2f} us, {us / limit_us:5.2f} of it"
        print(line + "".join(f"  {key} {float(value):.2f}" for key, value in beside.items()), flush=True)
        result = {"name": name, "rows": rows, "us": round(us, 2), "min_us": round(min(times), 2)}
        result |= {"max_us": round(max(times), 2), "limit_us": round(limit_us, 2)}
        self.results.append(result | {key: round(float(value), 3) for key, value in beside.items()})


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def int32(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def weight_copies(k: int, n: int) -> list[torch.Tensor]:
    return [half(k, n).div_(k**0.5) for _ in range(max(2, min(CALLS, -(-COLD_BYTES // (2 * k * n)))))]


def bench_linear(bench: Bench, rows: list[int]) -> None:
    for name, (k, n) in WEIGHTS.items():
        copies = weight_copies(k, n)
        weights = [copies[i % len(copies)] for i in range(CALLS)]
        out_dtype = torch.float32 if name == "head" else None
        for m in rows:
            if name == "head" and m > HEAD_ROWS:
                continue
            x = half(m, k)
            library = statistics.median(graph_times([partial(torch.mm, x, w) for w in weights], bench.replays))
            num_bytes = 2 * k * n + 2 * m * k + (4 if out_dtype else 2) * m * n
            is_equal = torch.equal(linear_on_gpu(x, copies[0]), torch.mm(x, copies[0]))
            calls = [partial(linear_on_gpu, x, w, out_dtype=out_dtype) for w in weights]
            limit = bench.limit_us(num_bytes, 2 * m * k * n)
            bench.report(f"linear {name} {k}x{n}", m, calls, limit, cublas_us=library, equals_cublas=is_equal)


def drafts_by_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return argmax_rows(linear_on_gpu(hidden, weight, out_dtype=torch.float32))


def bench_draft_head(bench: Bench, tried: Sequence[Tiles] = ()) -> None:
    """Drafts of a batch from the head in fp8, beside logits and their argmax: by the tiles in use, then by others."""
    for vocab, m in product(DRAFT_VOCABS, DRAFT_ROWS):
        weight, hidden = half(HIDDEN, vocab).div_(HIDDEN**0.5), half(m, HIDDEN)
        head, by_logits = quantize_head(weight), partial(drafts_by_logits, hidden, weight)
        logits_us = statistics.median(graph_times([by_logits] * LONG_CALLS, bench.replays))
        agree = (draft_tokens_triton(hidden, head) == by_logits()).float().mean()
        limit = bench.limit_us(draft_head_bytes(vocab, HIDDEN) + 2 * hidden.numel(), m * vocab * HIDDEN)  # fp8: twice
        fitting = [tiles for tiles in tried if min(m, 128) <= tiles.block_m < 2 * max(m, 16)]
        calls = {tiles: partial(draft_tokens_triton, hidden, head, tiles=tiles) for tiles in (None, *fitting)}
        compile_all(calls.values())
        for tiles, call in calls.items():
            name = f"draft_head {HIDDEN}x{vocab}" + (f" {tuple(tiles[:5])}" if tiles else "")
            bench.report(name, m, [call] * CALLS, limit, agree=agree, by_logits_us=logits_us)


def draft_tiles() -> list[Tiles]:
    """Those to try that fit into the shared memory, and whose sums fit into registers."""
    sizes = product((16, 32, 64, 128, 256), (128, 256), (128, 256), (4, 8), (2, 3, 4, 5, 6))
    tried = [tiles for tiles in (Tiles(*each) for each in sizes) if tiles.block_m * tiles.block_n <= 4096 * tiles[3]]
    return [t for t in tried if (t.block_m + t.block_n) * t.block_k * t.num_stages <= SHARED_BYTES]


def bench_row_kernels(bench: Bench, rows: list[int]) -> None:
    """A few copies of the rows: at small M they stay in the L2 cache, as they do in a forward pass."""
    weight, wide = torch.randn(HIDDEN, device=DEVICE), torch.randn(MAMBA_WIDTH, device=DEVICE)
    for m in rows:
        x, residual, up, gate = half(m, HIDDEN), half(m, HIDDEN), half(m, UP), half(m, IN_PROJ)[:, :MAMBA_WIDTH]
        y = torch.randn(m, MAMBA_WIDTH, device=DEVICE)
        calls = {  # bytes moved, call
            "rms_norm": (4 * x.numel(), partial(rms_norm, x, weight, 1e-5)),
            "add_rms_norm": (8 * x.numel(), partial(add_rms_norm, x, residual, weight, 1e-5)),
            "rms_norm_gated": (8 * y.numel(), partial(rms_norm_gated, y, gate, wide, 1e-5, MAMBA_WIDTH // GROUPS)),
            "relu2": (4 * up.numel(), partial(relu2, up)),
        }
        if m <= HEAD_ROWS:
            logits, ids = torch.randn(m, VOCAB, device=DEVICE), torch.randint(2, (m * (DRAFTS + 1),), device=DEVICE)
            start, query_len = int32(range(0, len(ids), DRAFTS + 1)), int32([DRAFTS + 1] * m)
            of_rows = (start, query_len, query_len, start, query_len)
            calls["argmax_rows"] = (4 * logits.numel(), partial(argmax_rows, logits))
            calls["verify_drafts"] = (132 * m, partial(verify_drafts, ids, ids, *of_rows, DRAFTS))
        for name, (num_bytes, call) in calls.items():
            bench.report(name, m, [call] * CALLS, bench.limit_us(num_bytes))


def mamba_rows(num_rows: int, q: int, keep_all: bool, defers: bool = False) -> MambaRows:
    """Decode rows of q tokens, or prefill rows that keep their last state; row r owns q + 1 blocks.

    defers: rows that leave their drafts' inputs, and run one draft of the step before again.
    """
    decode = q <= DRAFTS + 1
    kept = [r * (q + 1) + 1 + t if keep_all or t == q - 1 else -1 for r in range(num_rows) for t in range(q)]
    if not decode:
        kept = [r if t == q - 1 else -1 for r in range(num_rows) for t in range(q)]
    blocks = [r * (q + 1) if decode else r for r in range(num_rows)]
    left = int32([r * (q + 1) + 2 + i for r in range(num_rows) for i in range(DRAFTS)]).view(num_rows, DRAFTS)
    ones = int32([1] * num_rows)
    return MambaRows(
        query_start=int32(q * r for r in range(num_rows)),
        query_len=int32([q] * num_rows),
        max_query_len=q,
        conv_block=int32(blocks),
        conv_offset=int32([0] * num_rows),
        temporal_block=int32(blocks),
        is_decode=int32([int(decode)] * num_rows),
        state_block=int32(kept),
        all_decode=decode,
        deferral=Deferral(ones, ones, left) if defers else None,
    )


def find(module: str, name: str) -> Callable | None:
    try:
        return getattr(importlib.import_module(f"mambalign.kernels.{module}"), name)
    except (ImportError, AttributeError):
        print(f"{name}: not there")
        return None


def bench_mamba(bench: Bench) -> None:
    """Conv and scan of one layer: verification of drafts in a full batch, one request, and one long prompt."""
    scan, conv = find("mamba2_scan", "mamba2_scan_varlen"), find("causal_conv1d", "causal_conv1d_varlen")
    conv_weight, conv_bias = torch.randn(CONV_WIDTH, CONV_DIM, device=DEVICE), torch.randn(CONV_DIM, device=DEVICE)
    for num_rows, q, kept in ((128, 4, "all"), (128, 4, "deferred"), (128, 1, ""), (1, 4, "all"), (1, 2048, "")):
        rows, tokens = mamba_rows(num_rows, q, kept != "", kept == "deferred"), num_rows * q
        num_blocks = num_rows * (q + 1) if rows.all_decode else num_rows
        projected = half(tokens, IN_PROJ)
        name = f"{num_rows} rows of {q}" + (f", {kept} states" if kept else "")
        if scan:
            arguments = scan_arguments(projected, num_blocks, rows)
            moved = num_rows * (1 + (q if kept == "all" else 1)) * 4 * HEADS * HEAD_DIM * D_STATE
            limit = bench.limit_us(moved + tokens * (2 * CONV_DIM + 4 * MAMBA_WIDTH))
            bench.report(f"scan {name}", tokens, [partial(scan, *arguments)] * CALLS, limit)
        for layout in ("SD", "DS") if conv else ():
            shape = (CONV_WIDTH - 1 + DRAFTS, CONV_DIM)
            state = torch.zeros(
                num_blocks, *(shape if layout == "SD" else shape[::-1]), dtype=torch.bfloat16, device=DEVICE
            )
            arguments = (projected[:, MAMBA_WIDTH:-HEADS], state, conv_weight, conv_bias, rows, layout)
            limit = bench.limit_us(4 * CONV_DIM * (tokens + num_rows * CONV_WIDTH))
            bench.report(f"conv {layout} {name}", tokens, [partial(conv, *arguments)] * CALLS, limit)


def scan_arguments(projected: torch.Tensor, num_blocks: int, rows: MambaRows) -> tuple:
    """What either scan of one layer takes, cut from what in_proj returns."""
    A, D, dt_bias = (torch.rand(HEADS, device=DEVICE) for _ in range(3))
    state = torch.zeros(num_blocks, HEADS, HEAD_DIM, D_STATE, device=DEVICE)
    x = projected[:, MAMBA_WIDTH : 2 * MAMBA_WIDTH].unflatten(1, (HEADS, HEAD_DIM))
    b, c = projected[:, 2 * MAMBA_WIDTH : -HEADS].unflatten(1, (2, GROUPS, D_STATE)).unbind(1)
    return (x, projected[:, -HEADS:], b, c, -A, D, dt_bias, 0.0, state, rows)


def bench_chunks(bench: Bench, tried: Sequence[ChunkTiles] = ()) -> None:
    """The chunked scan of one layer over a long prompt, and over eight at once: by the tiles in use, then by others.

    Says so where tiles of one chunk give different bits.
    """
    for num_rows, q in ((1, 8192), (8, 1024)):
        rows, tokens = mamba_rows(num_rows, q, keep_all=False), num_rows * q
        arguments = scan_arguments(half(tokens, IN_PROJ), num_rows, rows)
        limit = bench.limit_us(tokens * (2 * CONV_DIM + 4 * MAMBA_WIDTH))
        calls = {t: partial(mamba2_chunk_scan_varlen_triton, *arguments, tiles=t) for t in (TILES, *tried)}
        compile_all(calls.values())
        expected: dict[int, list[torch.Tensor]] = {}  # by chunk
        for tiles, call in calls.items():
            try:
                state = arguments[-2].zero_()
                result = [call(), state.clone()]
                name = f"chunks {num_rows} rows of {q} {tuple(tiles)}"
                bench.report(name, tokens, [call] * LONG_CALLS, limit)
            except Exception as error:  # too much shared memory
                print(f"  {tiles}: {str(error).splitlines()[0][:80]}")
                continue
            if not all(map(torch.equal, result, expected.setdefault(tiles.chunk, result))):
                print(f"  {tiles}: OTHER BITS than the first tiles of this chunk")


def bench_delta(bench: Bench) -> None:
    """The gated delta rule of one layer of a 9B Qwen3.5: prompts token by token and by chunks, and a decode step."""
    rules = {
        "delta rule": find("gated_delta_rule", "gated_delta_rule_varlen"),
        "delta rule by chunks": find("gated_delta_chunk_scan", "gated_delta_chunk_scan_varlen"),
    }
    key_width, width = DELTA_KEY_HEADS * DELTA_DIM, DELTA_HEADS * DELTA_DIM
    A, dt_bias = -torch.rand(DELTA_HEADS, device=DEVICE), torch.rand(DELTA_HEADS, device=DEVICE)
    for num_rows, q in ((1, 8192), (8, 1024), (32, DRAFTS + 1)):
        is_decode = q == DRAFTS + 1
        rows, tokens = mamba_rows(num_rows, q, keep_all=is_decode, defers=is_decode), num_rows * q
        num_states = num_rows * (q + 1) if is_decode else num_rows
        state = torch.zeros(num_states, DELTA_HEADS, DELTA_DIM, DELTA_DIM, device=DEVICE)
        qkv, gates = half(tokens, 2 * key_width + width), half(tokens, 2 * DELTA_HEADS)
        heads = [part.unflatten(1, (-1, DELTA_DIM)) for part in qkv.split([key_width, key_width, width], dim=1)]
        arguments = (*heads, *gates.split(DELTA_HEADS, dim=1), A, dt_bias, state, rows)
        limit = bench.limit_us(num_rows * 2 * 4 * state[0].numel() + 2 * qkv.numel() + 4 * tokens * width)
        for name, run in rules.items():
            if run and not (rows.all_decode and "chunks" in name):
                num_calls = CALLS if rows.all_decode or "chunks" in name else 2
                calls = [partial(run, *arguments)] * num_calls
                bench.report(f"{name} {num_rows} rows of {q}", tokens, calls, limit)


def bench_attention(bench: Bench) -> None:
    """One attention layer: a full batch of drafts over contexts, one request, and a prompt."""
    attend = find("attention", "paged_attention_varlen")
    for num_rows, q, context in ((128, 4, 2048), (1, 4, 32768), (1, 4096, 0)) if attend else ():
        width = -(-(context + q) // KV_BLOCK)
        keys, values = (half(num_rows * width, KV_BLOCK, KV_HEADS, ATTENTION_DIM) for _ in range(2))
        rows = AttentionRows(
            query_start=int32(q * r for r in range(num_rows)),
            query_len=int32([q] * num_rows),
            context_len=int32([context] * num_rows),
            block_table=torch.randperm(num_rows * width, device=DEVICE).int().view(num_rows, width),
            max_query_len=q,
            max_context_len=context + q,
        )
        query = half(num_rows * q, QUERY_HEADS, ATTENTION_DIM)
        operations = 4 * num_rows * QUERY_HEADS * ATTENTION_DIM * (q * context + q * (q + 1) // 2)
        limit = bench.limit_us(2 * keys.numel() * 2 + 4 * query.numel(), operations)
        calls = [partial(attend, query, keys, values, rows, ATTENTION_DIM**-0.5)] * CALLS
        bench.report(f"attention {num_rows} rows of {q} after {context}", num_rows * q, calls, limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=5, help="graph replays, of which the median counts")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="numbers of rows")
    parts = {
        "linear": lambda: bench_linear(bench, options.rows),
        "draft_head": lambda: bench_draft_head(bench),
        "rows": lambda: bench_row_kernels(bench, options.rows),
        "mamba": lambda: bench_mamba(bench),
        "chunks": lambda: bench_chunks(bench),
        "delta": lambda: bench_delta(bench),
        "attention": lambda: bench_attention(bench),
    }
    parser.add_argument("--only", choices=parts, nargs="*", help="some of the parts")
    tried = {
        "chunks": lambda: bench_chunks(bench, [ChunkTiles(*t) for t in product((32, 64), (1, 2, 4), (4, 8), (2, 3))]),
        "draft_head": lambda: bench_draft_head(bench, draft_tiles()),
    }
    parser.add_argument("--tiles", choices=tried, help="try those of this part, and nothing else")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the times would say nothing")
    torch.manual_seed(0)
    bench = Bench(options.replays)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"ceilings: copy {bench.tb_s:.2f} TB/s, read plus write; {TFLOPS:.0f} TFLOP/s, bf16")
    if options.tiles:
        tried[options.tiles]()
    for part in () if options.tiles else options.only or parts:
        parts[part]()
    result = {"device": torch.cuda.get_device_name(), "copy_tb_s": round(bench.tb_s, 3), "results": bench.results}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
