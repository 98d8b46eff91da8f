#!/usr/bin/env python3
"""How fast recurrent states move before a step: the fused pre-copy beside the device's copy rate and the scalar path.

States as in an 8B Nemotron-H: 24 layers, conv 10240 x 6 bf16, temporal 128 x 64 x 128 fp32 (104 MB a row). Times are
of CUDA-graph replays, the median of many, a graph holding several launches that touch different rows, so that nothing
comes from the L2 cache. The first line is the ceiling; the last is one JSON object. Needs a CUDA device.
"""

import argparse
import json
import statistics
import time

import torch
import triton
from device_times import graph_times
from machine_rates import copy_rate

from mambalign.kernels.launch import persistent_programs
from mambalign.kernels.mamba_state_table import COPY_BLOCK_SIZE
from mambalign.kernels.postprocess_mamba import postprocess_mamba_fused
from mambalign.kernels.precopy_mamba_align import precopy_mamba_align_fused
from mambalign.kernels.preprocess_mamba_align import preprocess_mamba_align_fused
from mambalign.worker.batch import NewRow, ScheduledRow, SchedulerOutput
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import PrecopyInfo
from mambalign.worker.mamba_utils import MambaSpecDecodeGPUContext, preprocess_mamba
from mambalign.worker.sampling_params import SamplingParams
from mambalign.worker.scalar_copy import MambaCopyList, collect_mamba_copy_meta, do_mamba_copy_block
from mambalign.worker.slot_batch import SlotBatch
from mambalign.worker.state_cache import StateCache

LAYERS, CONV_DIM, STATE_LEN, TEMPORAL = 24, 10240, 6, (128, 64, 128)
NUM_ROWS, COLUMNS, CONV_WIDTH, BLOCK_TOKENS = 64, 4, 4, 128
LAUNCHES = 16  # of a graph
CASES = [(64, 0), (64, 1), (64, 4), (32, 32)]  # rows of the step, rows that cross
TARGET_US = {(64, 0): 3, (64, 1): 54, (64, 4): 205, (32, 32): 1660}
ROW_BYTES = LAYERS * (CONV_DIM * STATE_LEN * 2 + 4 * TEMPORAL[0] * TEMPORAL[1] * TEMPORAL[2])


def make_cache(layout: str, conv: list[torch.Tensor], temporal: list[torch.Tensor]) -> StateCache:
    cache = StateCache(16, BLOCK_TOKENS, layout, CONV_WIDTH)
    shape = (-1, CONV_DIM, STATE_LEN) if layout == "DS" else (-1, STATE_LEN, CONV_DIM)
    cache.conv, cache.temporal = [tensor.view(shape) for tensor in conv], temporal
    return cache


def random_states() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Conv and temporal states of every layer, random bits, block 0 spare."""
    blocks = 1 + NUM_ROWS * COLUMNS
    conv = [torch.empty(blocks, CONV_DIM * STATE_LEN, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    temporal = [torch.empty(blocks, *TEMPORAL, device="cuda") for _ in range(LAYERS)]
    for tensor in conv + temporal:
        tensor.view(-1).view(torch.int32).random_()
    return conv, temporal


def spread(times: list[float]) -> str:
    return f"{statistics.median(times):9.2f} us  [{min(times):.2f} .. {max(times):.2f}]"


def rate(us: float, num_bytes: int) -> float:
    """TB/s, bytes read plus bytes written."""
    return 2 * num_bytes / us / 1e6


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def moved_bytes(crossing: int, bias: int) -> int:
    """Bytes that have to move: with bias 1 a temporal state lies at its destination already."""
    conv = LAYERS * CONV_DIM * (STATE_LEN - bias) * 2
    temporal = 0 if bias == 1 else ROW_BYTES - LAYERS * CONV_DIM * STATE_LEN * 2
    return crossing * (conv + temporal)


class Bench:
    def __init__(self, cache: StateCache, num_programs: int, copy_block_size: int, replays: int):
        self.ctx = MambaSpecDecodeGPUContext(
            cache, NUM_ROWS, COLUMNS, copy_block_size=copy_block_size, num_programs=num_programs
        )
        self.layout, self.replays, ctx = cache.conv_layout, replays, self.ctx
        blocks = 1 + torch.randperm(NUM_ROWS * COLUMNS, generator=torch.Generator().manual_seed(0))
        ctx.block_table_buf.np[:] = blocks.view(-1, 1, COLUMNS).numpy()
        ctx.stage(NUM_ROWS)
        self.idx_mapping = int32(list(reversed(range(NUM_ROWS))))

    def crossing(self, rows: int, crossing: int, launch: int) -> list[int]:
        return [(launch * crossing + i) % rows for i in range(crossing)]

    def precopy(self, rows: int, crossing: int, bias: int, use_work_list: bool = True) -> list[float]:
        launches = []
        dest, biases = int32([1] * NUM_ROWS), int32([bias] * NUM_ROWS)
        for i in range(LAUNCHES):
            moving = self.crossing(rows, crossing, i)
            source = [-1] * NUM_ROWS
            for row in moving:
                source[int(self.idx_mapping[row])] = 0
            lists = (int32(moving or [0]), int32([crossing])) if use_work_list else (None, None)
            decided = (int32(source), dest, biases, self.ctx.block_table_buf.gpu, self.idx_mapping, *lists, rows)
            launches.append(lambda decided=decided: precopy_mamba_align_fused(*decided, self.ctx.state_table))
        return graph_times(launches, self.replays)

    def decide_and_precopy(self, rows: int) -> list[float]:
        """A whole V2 step in which nothing crosses: the decision's launch and the copy's."""
        ctx, n, q = self.ctx, int32([BLOCK_TOKENS + 9] * NUM_ROWS), int32([4] * NUM_ROWS)
        column = int32([1] * NUM_ROWS)
        lists = (ctx.work_list_buf.gpu, ctx.work_count_buf.gpu, torch.zeros(2, dtype=torch.int64, device="cuda"))
        decided = (ctx.precopy_src_col_buf.gpu, ctx.precopy_token_bias_buf.gpu, *lists)

        def step() -> None:
            preprocess_mamba_align_fused(self.idx_mapping, q, n, column, ctx.num_accepted, *decided, rows, BLOCK_TOKENS)
            ctx.run_fused_precopy(rows, idx_mapping=self.idx_mapping)

        return graph_times([step] * LAUNCHES, self.replays)

    def postprocess(self, rows: int, crossing: int, bias: int) -> list[float]:
        """`crossing` rows keep a boundary `bias` + 1 tokens into the step, one column back."""
        launches, running = [], int32([1] * NUM_ROWS)
        for i in range(LAUNCHES):
            moving = {int(self.idx_mapping[row]) for row in self.crossing(rows, crossing, i)}
            n = int32([BLOCK_TOKENS - 1 - bias if slot in moving else BLOCK_TOKENS for slot in range(NUM_ROWS)])
            kept, accepted = int32([bias + 2] * rows), int32([1] * NUM_ROWS)
            counts = (kept, n, running, accepted, self.ctx.block_table_buf.gpu, self.idx_mapping, rows, BLOCK_TOKENS)
            launches.append(lambda counts=counts: postprocess_mamba_fused(*counts, self.ctx.state_table))
        return graph_times(launches, self.replays)

    def scalar(self, rows: int, crossing: int, bias: int) -> float:
        """Pointer list and memcpy, host time included."""
        table, metas, times = self.ctx.block_table_buf.np[:, 0], self.ctx.state_table.metas, []
        for i in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            copies = MambaCopyList()
            for row in self.crossing(rows, crossing, i):
                collect_mamba_copy_meta(copies, metas, self.layout, table[row], PrecopyInfo(0, 1, bias))
            do_mamba_copy_block(copies, "cuda")
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)


def host_times(num_reqs: int, crossing: int, runner: str) -> float:
    """Microseconds of host time of a step's decision and launches, small states."""
    width, steps = 40, 60
    conv, temporal = torch.zeros(num_reqs * 3 + 1, 8, 6, device="cuda"), torch.zeros(num_reqs * 3 + 1, 8, device="cuda")
    cache = StateCache(16, BLOCK_TOKENS, "DS", CONV_WIDTH, conv=[conv] * LAYERS, temporal=[temporal] * LAYERS)
    ctx = MambaSpecDecodeGPUContext(cache, num_reqs, width)
    is_v1, times = runner == "v1", []
    batch = InputBatch(num_reqs, width, BLOCK_TOKENS) if is_v1 else SlotBatch(ctx, num_reqs, 3, 0)
    for r in range(num_reqs):
        batch.add(NewRow(str(r), SamplingParams(), 0, 1, [0], 0))
    n = [BLOCK_TOKENS - 1 if r < crossing else BLOCK_TOKENS + 9 for r in range(num_reqs)]
    running = [0 if r < crossing else 1 for r in range(num_reqs)]
    blocks = [{k: 1 + 3 * r + k for k in range(3)} for r in range(num_reqs)]
    rows = [ScheduledRow(str(r), 0, n[r], [0] * 4, True, [], blocks[r], [], None) for r in range(num_reqs)]
    for _ in range(steps):
        if is_v1:
            batch.mamba_state_idx[:] = running
        else:
            batch.running_column.copy_(int32(running))
            batch.num_computed.copy_(int32(n))
        torch.cuda.synchronize()
        start = time.perf_counter()
        idx_mapping = None if is_v1 else batch.to_device([batch.slot_of[row.request_id] for row in rows], torch.int32)
        preprocess_mamba(SchedulerOutput(rows), batch, cache, align_ctx=ctx, idx_mapping=idx_mapping)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=30, help="graph replays, of which the median counts")
    parser.add_argument("--programs", type=int, nargs="*", help="programs of a launch (several: compare)")
    parser.add_argument("--copy-block-size", type=int, nargs="*", help="bytes of a tile (several: compare)")
    parser.add_argument("--quick", action="store_true", help="the four cases only, bias 2")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the times would say nothing")
    ceiling = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"device copy: {ceiling:.2f} TB/s, read plus write: the ceiling")
    conv, temporal = random_states()
    result = {"device": torch.cuda.get_device_name(), "copy_tb_s": round(ceiling, 3), "cases": []}
    for programs in options.programs or [persistent_programs(torch.device("cuda"))]:
        for copy_block_size in options.copy_block_size or [COPY_BLOCK_SIZE]:
            print(f"\n{programs} programs, tiles of {copy_block_size} bytes")
            for layout in ("SD", "DS"):
                bench = Bench(make_cache(layout, conv, temporal), programs, copy_block_size, options.replays)
                result["cases"] += run_cases(bench, ceiling, options.quick)
    if not options.quick:
        for runner in ("v1", "v2"):
            for rows in (1, 64, 256):
                us = [host_times(rows, crossing, runner) for crossing in (0, min(rows, 4))]
                print(f"host time of preprocess_mamba, {runner}, {rows} rows: {us[0]:.0f} us, crossing {us[1]:.0f} us")
                result[f"host_{runner}_{rows}_us"] = [round(x, 1) for x in us]
    print(json.dumps(result))


def run_cases(bench: Bench, ceiling: float, quick: bool) -> list[dict]:
    results = []
    for rows, crossing in CASES:
        biases = [2] if quick else [0, 2] if crossing else [0]
        for bias in biases + [1, 3] * (crossing == 4 and not quick):
            times = bench.precopy(rows, crossing, bias)
            us = statistics.median(times)
            line = f"{bench.layout} {rows:2} rows, {crossing:2} crossing, bias {bias}: {spread(times)}"
            if crossing:
                speed = rate(us, moved_bytes(crossing, bias))
                line += f"  {speed:.2f} TB/s, {100 * speed / ceiling:.0f}% of the copy rate"
            if bias in (0, 2):
                line += f"  (target {TARGET_US[rows, crossing]} us)"
            if crossing and not quick and not (bench.layout == "DS" and bias):
                line += f"; scalar path {bench.scalar(rows, crossing, bias):.0f} us"
            print(line)
            case = {"layout": bench.layout, "rows": rows, "crossing": crossing, "bias": bias, "us": round(us, 2)}
            results.append(case | {"min_us": round(min(times), 2), "max_us": round(max(times), 2)})
    if not quick:
        for name, times in (
            ("without a work list, none crossing", bench.precopy(64, 0, 0, use_work_list=False)),
            ("V2 decision and copy, none crossing", bench.decide_and_precopy(64)),
            ("post-copy, none crossing", bench.postprocess(64, 0, 2)),
            ("post-copy, 1 crossing, bias 2", bench.postprocess(64, 1, 2)),
        ):
            print(f"{bench.layout} 64 rows, {name}: {spread(times)}")
            results.append({"layout": bench.layout, "what": name, "us": round(statistics.median(times), 2)})
    return results


if __name__ == "__main__":
    main()
