"""The picture of a benchmark: waiting times, gaps, and tokens a second over the time of a pass. Needs matplotlib."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from mambalign.engine.bench_figures import Sample

SUFFIXES = (".png", ".svg", ".pdf")
SLICES = 40


def check_plot(path: str) -> None:
    """Whether it will be possible to write it. Raises ValueError that says what to do."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: no such folder")


def plot(passes: dict[str, list[list[Sample]]], title: str, path: str) -> None:
    """`passes`: kind ("cold", "warm") -> the requests of each of its passes."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    figure = Figure(figsize=(13, 4), layout="constrained")
    first, gap, rate = figure.subplots(1, 3)
    figure.suptitle(title)
    for kind, repeats in passes.items():
        done = [[s for s in samples if s.error is None and s.seen] for samples in repeats]
        every = [s for samples in done for s in samples]
        steps(first, [1000 * s.ttft for s in every], kind)
        steps(gap, [1000 * g for s in every for g in s.gaps], kind)
        if done and done[-1]:
            rate.plot(*tokens_over_time(done[-1]), label=kind)
    for axes, name in ((first, "time to first token, ms"), (gap, "gap between pieces, ms")):
        axes.set(xlabel=name, ylabel="share of all", ylim=(0, 1))
    rate.set(xlabel="seconds into the last pass", ylabel="output tokens a second", ylim=(0, None))
    for axes in (first, gap, rate):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def steps(axes, values: Sequence[float], kind: str) -> None:
    """The share of values that are at most x."""
    ranked = sorted(values)
    axes.step(ranked, [(i + 1) / len(ranked) for i in range(len(ranked))], where="post", label=kind)


def tokens_over_time(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Middles of `SLICES` slices of the time, and the tokens a second in each; a request's pieces count the same."""
    start, end = min(s.asked for s in samples), max(s.seen[-1] for s in samples)
    slice_seconds = max(end - start, 1e-9) / SLICES
    counts = [0.0] * SLICES
    for sample in samples:
        for when in sample.seen:
            counts[min(int((when - start) / slice_seconds), SLICES - 1)] += sample.num_tokens / len(sample.seen)
    return [(i + 0.5) * slice_seconds for i in range(SLICES)], [count / slice_seconds for count in counts]
