"""From the times of requests to the figures of a benchmark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any


@dataclass
class Sample:
    """One request. Times are seconds of one clock."""

    asked: float  # when it was sent, or should have been
    seen: list[float] = field(default_factory=list)  # when a piece of its answer came
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.seen[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        """Between its pieces, each one or several tokens."""
        return [after - before for before, after in pairwise(self.seen)]

    @property
    def num_prompt_tokens(self) -> int:
        return self.usage.get("prompt_tokens", 0)

    @property
    def num_tokens(self) -> int:
        return self.usage.get("completion_tokens", 0)

    def detail(self, part: str, name: str) -> int | None:
        """A figure of the usage that not every server tells."""
        return (self.usage.get(f"{part}_tokens_details") or {}).get(name)


@dataclass(frozen=True)
class Figure:
    name: str
    label: str
    decimals: int


FIGURES = (
    Figure("output_tokens_per_s", "output tokens a second", 1),
    Figure("requests_per_s", "requests a second", 2),
    Figure("ttft_p50_ms", "first token, p50, ms", 1),
    Figure("ttft_p99_ms", "first token, p99, ms", 1),
    Figure("gap_p50_ms", "gap between pieces, p50, ms", 1),
    Figure("gap_p99_ms", "gap between pieces, p99, ms", 1),
    Figure("token_p50_ms", "a token after the first, p50, ms", 2),
    Figure("hit_rate", "prompt tokens cached, share", 4),
    Figure("acceptance", "drafts accepted, share", 4),
)


def figures_of(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Those of `FIGURES` over the requests of one pass that were answered; None for what the server does not tell."""
    done = [sample for sample in samples if sample.error is None and sample.seen]
    if not done:
        return {figure.name: None for figure in FIGURES}
    seconds = max(s.seen[-1] for s in done) - min(s.asked for s in done)
    ttfts = [s.ttft for s in done]
    gaps = [gap for s in done for gap in s.gaps]
    token_times = [(s.seen[-1] - s.seen[0]) / (s.num_tokens - 1) for s in done if s.num_tokens > 1]
    accepted = total(done, "completion", "accepted_prediction_tokens")
    rejected = total(done, "completion", "rejected_prediction_tokens")
    has_drafts = accepted is not None and rejected is not None and accepted + rejected > 0
    return {
        "output_tokens_per_s": sum(s.num_tokens for s in done) / seconds,
        "requests_per_s": len(done) / seconds,
        "ttft_p50_ms": 1000 * percentile(ttfts, 50),
        "ttft_p99_ms": 1000 * percentile(ttfts, 99),
        "gap_p50_ms": 1000 * percentile(gaps, 50) if gaps else None,
        "gap_p99_ms": 1000 * percentile(gaps, 99) if gaps else None,
        "token_p50_ms": 1000 * percentile(token_times, 50) if token_times else None,
        "hit_rate": ratio(total(done, "prompt", "cached_tokens"), sum(s.num_prompt_tokens for s in done)),
        "acceptance": accepted / (accepted + rejected) if has_drafts else None,
    }


def total(samples: Sequence[Sample], part: str, name: str) -> int | None:
    """None if the server tells it of no request."""
    values = [value for s in samples if (value := s.detail(part, name)) is not None]
    return sum(values) if values else None


def ratio(some: int | None, of: int) -> float | None:
    return None if some is None or not of else some / of


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed; 0 of none."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)] if ranked else 0.0


def spread(passes: Sequence[dict[str, float | None]]) -> dict[str, dict[str, float]]:
    """Median, least and most of each figure over the passes, without figures that nobody told."""
    result = {}
    for figure in FIGURES:
        values = [value for figures in passes if (value := figures[figure.name]) is not None]
        if values:
            numbers = {"median": median(values), "min": min(values), "max": max(values)}
            result[figure.name] = {name: round(number, figure.decimals) for name, number in numbers.items()}
    return result
