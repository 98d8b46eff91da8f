"""What runs of the proof went through. A proof that went through nothing must not pass."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from lossless.plan import Setup

MAX_BIAS = 8  # S


@dataclass
class Tally:
    """Sums over runs. Keys of `crossings` and `kept`: runner, layout, token bias."""

    runs: int = 0
    requests: int = 0
    tokens: int = 0  # delivered and compared
    steps: int = 0
    steps_ahead: int = 0  # launched over one in flight
    hits: int = 0  # requests whose prompt began in the cache
    hit_tokens: int = 0
    prompt_logprobs: int = 0  # requests that got them
    grammars: int = 0  # requests held to one
    grammar_drafts: int = 0  # that were kept in their texts
    preemptions: int = 0
    aborts: int = 0  # of requests that had not ended
    resets: int = 0  # of the prefix cache
    cut_rows: int = 0  # accepted runs in the middle of which a text ended
    discarded: int = 0  # rows whose result came too late
    drafts: int = 0
    accepted: int = 0
    replays: int = 0  # drafts run again from their inputs, where no state of theirs was left
    states: int = 0  # published and compared
    kv_blocks: int = 0
    mismatches: int = 0
    crossings: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # states moved before a pass
    kept: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # boundaries kept after one
    seen: Counter[str] = field(default_factory=Counter)  # runs by "name=value" of the engine
    endings: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        for each in fields(self):
            mine, more = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, mine + more)

    def see(self, setup: Setup) -> None:
        """Note what the engine of a run was."""
        names = ("model", "runner", "layout", "block_tokens", "spec_tokens", "late", "checked", "prefix_caching")
        self.seen.update(f"{name}={getattr(setup, name)}" for name in names)
        self.seen[f"drafts={setup.spec_method if not setup.scripted else 'scripted'}"] += setup.spec_tokens > 0

    def gaps(self) -> list[str]:
        """What the runs should have gone through and did not."""
        wanted = [f"{name}={value}" for name, values in ENGINES.items() for value in values]
        gaps = [name for name in wanted if not self.seen[name]]
        for by_bias in ("crossings", "kept"):
            counter = getattr(self, by_bias)
            for runner in ("v1", "v2"):
                for layout in ("SD", "DS"):
                    missing = [bias for bias in range(MAX_BIAS + 1) if not counter[runner, layout, bias]]
                    gaps += [f"{by_bias} of {runner} {layout} with bias {missing}"] * bool(missing)
        gaps += [name for name in MUST_HAPPEN if not getattr(self, name)]
        return gaps + [f"ending {name}" for name in ("stop", "length", "abort") if not self.endings[name]]

    def by_bias(self, name: str) -> dict[int, int]:
        counts: Counter[int] = Counter()
        for (_, _, bias), count in getattr(self, name).items():
            counts[bias] += count
        return dict(sorted(counts.items()))

    def numbers(self) -> dict[str, Any]:
        """For the JSON line."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {name: value for name, value in values.items() if isinstance(value, int)}
        return {**plain, "crossings": self.by_bias("crossings"), "kept": self.by_bias("kept"), "gaps": self.gaps()}

    def table(self) -> str:
        rows = [(name, f"{value:,}") for name, value in self.numbers().items() if isinstance(value, int)]
        for name in ("crossings", "kept"):
            counts = self.by_bias(name).items()
            rows.append((f"{name} by bias", ", ".join(f"{bias}: {count:,}" for bias, count in counts)))
        rows.append(("engines", ", ".join(f"{name} {count}" for name, count in sorted(self.seen.items()))))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.replace('_', ' '):{width}}  {value}" for name, value in rows)


ENGINES: dict[str, tuple[Any, ...]] = {
    "model": ("tiny", "shipped"),
    "runner": ("v1", "v2"),
    "layout": ("SD", "DS"),
    "block_tokens": (16, 32, 64, 128),
    "spec_tokens": tuple(range(MAX_BIAS + 1)),
    "drafts": ("mtp", "ngram", "scripted"),
    "late": (False, True),
    "checked": (False, True),
    "prefix_caching": (False, True),
}
MUST_HAPPEN = (
    *(
        "hits",
        "prompt_logprobs",
        "grammars",
        "grammar_drafts",
        "preemptions",
        "aborts",
        "resets",
        "cut_rows",
        "discarded",
        "accepted",
        "replays",
    ),
    *("steps_ahead", "states"),
)
