"""What the scheduler, and the blocks of its requests, must know of the engine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """Everything the scheduler must know of the engine, resolved."""

    max_num_seqs: int  # rows that run at once
    max_num_batched_tokens: int  # tokens a step, >= max_num_seqs
    max_model_len: int
    num_spec_tokens: int
    kv_block_tokens: int
    mamba_block_tokens: int
    num_kv_blocks: int  # null block included
    num_mamba_blocks: int
    enable_prefix_caching: bool
    num_lookahead_tokens: int  # KV slots past the step's tokens that the drafter writes: max(1, S), 0 without one
    schedules_ahead: bool = False  # plan a step while one is in flight
    chunk_tokens: int | None = None  # prompts are scanned by chunks of so many tokens, replies token by token
