"""What the scheduler has counted since start."""

from collections import Counter
from dataclasses import dataclass, field

from mambalign.engine.request import Request


@dataclass
class SchedulerCounters:
    """Totals since start, in tokens unless named otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_misses: Counter[str] = field(default_factory=Counter)  # requests by cause
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0  # requests
    drafted_rows: int = 0  # rows and steps that verified at least one draft
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # [S]

    def count_prompt(self, request: Request, num_hit_tokens: int, miss_cause: str | None) -> None:
        """Note a request's first admission, in the request too. miss_cause: one of `MISS_CAUSES`, None for a hit."""
        request.num_cached_tokens = num_hit_tokens
        self.prompt_tokens += request.num_prompt_tokens
        if miss_cause is not None:
            self.prefix_misses[miss_cause] += 1
        if miss_cause != "disabled":
            self.prefix_queries += request.num_prompt_tokens
            self.prefix_hits += num_hit_tokens

    def count_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Note drafts that a step verified, and how many of them the text kept, in the request too."""
        if num_drafts == 0:
            return
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        self.drafted_rows += 1
        self.draft_tokens += num_drafts
        self.accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1
