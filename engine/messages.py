"""What crosses the line between the API side and the engine: requests in, outputs and statistics back."""

import msgspec

from mambalign.worker.sampling_params import SamplingParams, TokenLogprobs


class EngineRequest(msgspec.Struct, frozen=True):
    """One sequence to generate. A request with n > 1 becomes n of these, numbered by `choice`.

    The engine owns `request_id` until an output with a `finish_reason` has been sent.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams  # `seed` is set: the client gives one to a request without
    choice: int = 0
    arrival_time: float = 0.0  # seconds, time.time()
    cache_salt: str = ""


class EngineOutput(msgspec.Struct, frozen=True):
    """What one step added to a request. Exactly one output of a request carries a `finish_reason`."""

    request_id: str
    new_text: str = ""
    new_token_ids: list[int] = []
    new_logprobs: list[TokenLogprobs] | None = None  # one per new token, when asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of prompt tokens 1, 2, ..; with the first output, if asked for
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    error: str | None = None  # text, with finish_reason "error"
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache at the first admission
    queue_seconds: float = 0.0  # from the request's arrival to its first admission
    num_draft_tokens: int = 0  # drafts verified so far
    num_accepted_tokens: int = 0  # of those, kept in the text so far


class EngineStats(msgspec.Struct, frozen=True):
    """Totals since start (`*_total`), and gauges, of one engine."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0..1, referenced blocks of the pool
    mamba_cache_usage: float = 0.0
    kv_cache_blocks: dict[str, int] = {}  # "held", "cached", "free" -> blocks
    mamba_cache_blocks: dict[str, int] = {}
    prefix_cache_queries_total: int = 0  # tokens
    prefix_cache_hits_total: int = 0  # tokens
    prefix_cache_misses: dict[str, int] = {}  # cause -> requests that found nothing at their first admission
    num_preemptions_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    spec_decode_num_drafts_total: int = 0  # steps of a row that verified at least one draft
    spec_decode_num_draft_tokens_total: int = 0
    spec_decode_num_accepted_tokens_total: int = 0
    spec_decode_accepted_per_position: list[int] = []  # [S]
    precopies_total: int = 0  # rows whose state moved before a forward pass
    precopies_biased_total: int = 0  # of those, with a token bias > 0
    postcopies_total: int = 0  # boundary states copied after sampling
    fused_copy_checks: dict[str, int] = {}  # token bias before the copy -> rows and steps checked
    fused_copy_copies: dict[str, int] = {}  # of those, rows that moved bytes
    fused_copy_mismatches_total: int = 0
