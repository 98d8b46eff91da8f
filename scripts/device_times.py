"""How long work takes on a CUDA device, by its own clock."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

WARM_UPS = 3  # that are not counted
COMPILERS = 12  # threads


def compile_all(calls: Iterable[Callable[[], object]]) -> None:
    """Side by side, before they are timed; whoever fails fails again there."""

    def compile_one(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:  # reported by the timing
            return

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(compile_one, calls))


def graph_times(calls: list[Callable[[], object]], replays: int) -> list[float]:
    """Microseconds a call in a CUDA graph of all of them, one number a replay."""
    for call in calls[:2]:
        call()  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return [us / len(calls) for us in event_times(graph.replay, replays)]


def event_times(work: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds, one number a repeat."""
    times = []
    for i in range(WARM_UPS + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if i >= WARM_UPS:
            times.append(start.elapsed_time(end) * 1000)
    return times
