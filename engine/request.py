"""A request as the engine sees it: its text, how far it is computed, and what it holds."""

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from mambalign.worker.mamba_columns import next_column
from mambalign.worker.sampling_params import SamplingParams, TokenLogprobs


class RequestStatus(enum.Enum):
    WAITING = enum.auto()  # holds no block
    RUNNING = enum.auto()
    FINISHED = enum.auto()  # holds no block


class InFlight(NamedTuple):
    """A request's part of a step that was launched and is not booked yet."""

    num_tokens: int
    is_decode: bool
    samples: bool


@dataclass(frozen=True)
class Outlook:
    """Where a request stands once its step in flight, if any, is booked: n lies in `least .. most`."""

    least: int
    most: int
    running_column: int
    is_decode: bool
    num_tokens: int  # longest that the text can be


@dataclass(eq=False)
class Request:
    """Counters are in tokens and named `num_*_tokens`; blocks are filled by `RequestBlocks`."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    choice: int = 0
    arrival_time: float = 0.0
    cache_salt: str = ""

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    num_computed_tokens: int = 0  # n: tokens whose KV and state are final
    num_admitted_tokens: int = 0  # tokens known at the last admission; a row past them decodes
    num_cached_tokens: int | None = None  # prefix-cache hit of the first admission
    queue_seconds: float | None = None  # from arrival to the first admission
    num_draft_tokens: int = 0  # drafts verified over the request's life
    num_accepted_tokens: int = 0  # of those, kept in the text
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of tokens 1, 2, .., when asked for

    admission: int = 0  # numbers this stay in the runner: a result of an earlier one is not the request's any more
    in_flight: deque[InFlight] = field(default_factory=deque)  # oldest first
    draft_token_ids: list[int] = field(default_factory=list)  # proposed for the next step, dropped by preemption
    running_column: int = -1  # c
    kv_blocks: list[int] = field(default_factory=list)
    mamba_blocks: dict[int, int] = field(default_factory=dict)  # column -> block id
    boundaries: list[int] = field(default_factory=list)  # whose prefill states are still to be kept
    block_hashes: list[bytes] = field(default_factory=list)  # of the known tokens' full KV blocks
    decode_checkpoint: bytes | None = None  # hash of the last boundary that decode published

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)  # prompt, then output

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def is_decode(self) -> bool:
        """All but the last known token is computed, and that token was sampled since the last admission."""
        return self.num_computed_tokens == self.num_tokens - 1 >= self.num_admitted_tokens

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Prompt tokens must run, cached or not, for their log-probabilities."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def boundaries_within(self, start: int, end: int) -> list[int]:
        """Of `boundaries`, those in `start + 1 .. end`."""
        return [m for m in self.boundaries if start < m <= end]

    def outlook(self, mamba_block_tokens: int) -> Outlook:
        """At most one step may be in flight."""
        n, column = self.num_computed_tokens, self.running_column
        if not self.in_flight:
            return Outlook(n, n, column, self.is_decode, self.num_tokens)
        (flight,) = self.in_flight
        end = n + flight.num_tokens
        column = next_column(column, n, flight.num_tokens, mamba_block_tokens)
        if flight.is_decode:
            return Outlook(n + 1, end, column, True, self.num_tokens + flight.num_tokens)
        return Outlook(end, end, column, flight.samples, self.num_tokens + flight.samples)

    def append(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
