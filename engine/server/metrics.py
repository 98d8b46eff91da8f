"""Prometheus metrics: the engine's statistics as they are, and times and sizes measured on the API side.

Every name is there from the start, at 0, and has the label `model_name`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from mambalign.engine.messages import EngineStats
from mambalign.engine.prefix_cache import MISS_CAUSES
from mambalign.engine.server.metric_names import OLD_NAMES, PREFIX, STATS_HELP, STATS_LABELS, STATS_NAMES

FINISH_REASONS = ("stop", "length", "abort", "error")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
CHOICES = (1, 2, 5, 10, 20, 50, 100)
BLOCK_STATES = ("held", "cached", "free")


class StatsCollector(Collector):
    """Turns the engine's latest statistics into metrics: `*_total` counts, a list has a position, the rest gauges."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.num_positions = 0  # of drafts; this and the next are known when the engine is ready
        self.runner_labels = {"runner": "", "layout": ""}

    def collect(self) -> Iterator[Metric]:
        for field, value in msgspec.structs.asdict(self.stats).items():
            name, text = PREFIX + STATS_NAMES.get(field, field), STATS_HELP.get(field, field)
            make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            if isinstance(value, list):
                value = dict.fromkeys(range(self.num_positions), 0) | dict(enumerate(value))
                yield labelled(make(name, text, labels=["position"]), value)
            elif isinstance(value, dict):
                label = STATS_LABELS[field]
                fixed = self.runner_labels if label == "bias" else {}
                counts = dict.fromkeys(self._keys(label), 0) | value
                yield labelled(make(name, text, labels=[*fixed, label]), counts, fixed)
            else:
                yield make(name, text, value=value)

    def _keys(self, label: str) -> Iterable[str]:
        biases = [str(bias) for bias in range(self.num_positions + 1)]
        return {"bias": biases, "cause": MISS_CAUSES, "state": BLOCK_STATES}[label]


def labelled(family: Any, counts: dict[Any, int], fixed: dict[str, str] | None = None) -> Metric:
    """One value a key of `counts`; `fixed` labels come first and are the same for all."""
    for key, count in counts.items():
        family.add_metric([*(fixed or {}).values(), str(key)], count)
    return family


class Metrics:
    """The engine's collector, what is measured here, and requests by how they ended."""

    def __init__(self) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self.engine = StatsCollector()
        self._registry.register(self.engine)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token"
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between tokens; a step's several tokens share its time"
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request's arrival to its last token"
        )
        self._queue_time = self._histogram("request_queue_time_seconds", "From arrival to the first step")
        self._prefill_time = self._histogram("request_prefill_time_seconds", "From the first step to the first token")
        self._decode_time = self._histogram("request_decode_time_seconds", "From the first token to the last")
        self._inference_time = self._histogram(
            "request_inference_time_seconds", "From the first step to the last token"
        )
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Decode time of a request by its tokens but the first"
        )
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._generation_tokens = self._histogram("request_generation_tokens", "Tokens generated for a request", TOKENS)
        self._max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens generated for the longest choice of a request", TOKENS
        )
        self._params_n = self._histogram("request_params_n", "Choices that a request asks for", CHOICES)
        self._params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request", TOKENS)
        self.finished = Counter(
            f"{PREFIX}request_success",
            "Requests by how they ended",
            ["finished_reason"],
            registry=self._registry,
        )
        for reason in FINISH_REASONS:
            self.finished.labels(reason)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)

    def observe_tokens(self, num_tokens: int, since: float, now: float, *, is_first: bool) -> None:
        """`num_tokens` came at `now`; `since` is the arrival for the first, else the time of the last ones."""
        if is_first:
            self.time_to_first_token.observe(now - since)
            return
        for _ in range(num_tokens):
            self.inter_token_latency.observe((now - since) / num_tokens)

    def observe_request(self, n: int, max_tokens: int) -> None:
        """A prompt was taken in, with what it asks for."""
        self._params_n.observe(n)
        self._params_max_tokens.observe(max_tokens)

    def observe_choice(
        self, *, arrival: float, queue_seconds: float, first_token: float, now: float, num_prompt: int, num_output: int
    ) -> None:
        """A choice came to its end at `now`; times are of one clock, in seconds, the counts in tokens."""
        start = min(arrival + queue_seconds, first_token)
        self.e2e_request_latency.observe(now - arrival)
        self._queue_time.observe(queue_seconds)
        self._prefill_time.observe(first_token - start)
        self._decode_time.observe(now - first_token)
        self._inference_time.observe(now - start)
        self._prompt_tokens.observe(num_prompt)
        self._generation_tokens.observe(num_output)
        if num_output > 1:
            self._time_per_output_token.observe((now - first_token) / (num_output - 1))

    def observe_end(self, num_longest: int) -> None:
        """All choices of a request have ended; the longest has so many tokens."""
        self._max_generation_tokens.observe(num_longest)

    def text(self, model_name: str) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(_ForDashboards(self._registry, model_name))


class _ForDashboards:
    """A registry's metrics with the label that dashboards choose by, and under old names too."""

    def __init__(self, registry: CollectorRegistry, model_name: str):
        self._registry = registry
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        old_names: dict[str, list[str]] = {}
        for old, new in OLD_NAMES.items():
            old_names.setdefault(PREFIX + new.removesuffix("_total"), []).append(PREFIX + old.removesuffix("_total"))
        for metric in self._registry.collect():
            yield self._copy(metric, metric.name)
            for old in old_names.get(metric.name, ()):
                yield self._copy(metric, old)

    def _copy(self, metric: Metric, name: str) -> Metric:
        copy = Metric(name, metric.documentation, metric.type)
        label = {"model_name": self._model_name}
        for sample in metric.samples:
            full_name = name + sample.name.removeprefix(metric.name)
            copy.samples.append(Sample(full_name, label | sample.labels, sample.value))
        return copy
