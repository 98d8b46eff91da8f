"""Prometheus metrics: the engine's statistics as they are, and latencies measured on the API side.

Every name is there from the start, at 0.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mambalign.engine.messages import EngineStats

PREFIX = "mambalign:"
FINISH_REASONS = ("stop", "length", "abort", "error")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# Names that differ from the field's, because dashboards know them so.
NAMES = {
    "kv_cache_usage": "kv_cache_usage_perc",
    "mamba_cache_usage": "mamba_cache_usage_perc",
    "spec_decode_accepted_per_position": "spec_decode_num_accepted_tokens_per_pos_total",
    "fused_copy_checks": "fused_copy_checks_total",
    "fused_copy_copies": "fused_copy_copies_total",
}
HELP = {
    "num_requests_running": "Requests in the running batch",
    "num_requests_waiting": "Requests that wait for room",
    "kv_cache_usage": "Share of KV blocks that requests hold, 0 to 1",
    "mamba_cache_usage": "Share of recurrent-state blocks that requests hold, 0 to 1",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix cache",
    "num_preemptions_total": "Requests preempted",
    "prompt_tokens_total": "Prompt tokens taken in",
    "generation_tokens_total": "Tokens generated",
    "spec_decode_num_drafts_total": "Steps of a request that verified drafts",
    "spec_decode_num_draft_tokens_total": "Draft tokens verified",
    "spec_decode_num_accepted_tokens_total": "Draft tokens kept",
    "spec_decode_accepted_per_position": "Draft tokens kept, by position in the draft",
    "precopies_total": "Rows whose state moved before a forward pass",
    "precopies_biased_total": "Of those, with a token bias above 0",
    "postcopies_total": "Boundary states copied after sampling",
    "fused_copy_checks": "Rows and steps compared with the scalar copy path",
    "fused_copy_copies": "Of those, rows whose state moved",
    "fused_copy_mismatches_total": "Of those, rows that differed",
}


def labelled(
    name: str, text: str, label: str, counts: dict[Any, int], fixed: dict[str, str] | None = None
) -> CounterMetricFamily:
    """One counter a key of `counts`, under `label`; `fixed` labels come first and are the same for all."""
    fixed = fixed or {}
    family = CounterMetricFamily(name, text, labels=[*fixed, label])
    for key, count in counts.items():
        family.add_metric([*fixed.values(), str(key)], count)
    return family


class StatsCollector(Collector):
    """Turns the engine's latest statistics into metrics: `*_total` counts, a list has a position, the rest gauges."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.num_positions = 0  # of drafts; this and the next are known when the engine is ready
        self.runner_labels = {"runner": "", "layout": ""}

    def collect(self) -> Iterator[Metric]:
        for field, value in msgspec.structs.asdict(self.stats).items():
            name, text = PREFIX + NAMES.get(field, field), HELP.get(field, field)
            if isinstance(value, list):
                positions = range(self.num_positions)
                yield labelled(name, text, "position", dict.fromkeys(positions, 0) | dict(enumerate(value)))
            elif isinstance(value, dict):
                biases = [str(bias) for bias in range(self.num_positions + 1)]
                yield labelled(name, text, "bias", dict.fromkeys(biases, 0) | value, self.runner_labels)
            elif name.endswith("_total"):
                yield CounterMetricFamily(name, text, value=value)
            else:
                yield GaugeMetricFamily(name, text, value=value)


class Metrics:
    """One registry: the engine's collector, the latency histograms, requests by how they ended."""

    def __init__(self) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.engine = StatsCollector()
        self.registry.register(self.engine)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token"
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between tokens; a step's several tokens share its time"
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request's arrival to its last token"
        )
        self.finished = Counter(
            f"{PREFIX}request_success",
            "Requests by how they ended",
            ["finished_reason"],
            registry=self.registry,
        )
        for reason in FINISH_REASONS:
            self.finished.labels(reason)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=SECONDS, registry=self.registry)

    def observe_tokens(self, num_tokens: int, since: float, now: float, *, is_first: bool) -> None:
        """`num_tokens` came at `now`; `since` is the arrival for the first, else the time of the last ones."""
        if is_first:
            self.time_to_first_token.observe(now - since)
            return
        for _ in range(num_tokens):
            self.inter_token_latency.observe((now - since) / num_tokens)
