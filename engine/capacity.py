"""Splits `--cache-memory` between the two pools, and says at start what that buys. Pure arithmetic."""

from dataclasses import dataclass

from mambalign.engine.option import ConfigError
from mambalign.worker.mamba_columns import cdiv

PREFILL_COLUMNS = 5  # source, running, and three asked boundaries


@dataclass(frozen=True)
class PoolPlan:
    """Sizes of both pools, null blocks included, and how many requests run at once."""

    num_kv_blocks: int
    num_mamba_blocks: int
    max_num_seqs: int


def states_per_request(num_spec_tokens: int, schedules_ahead: bool) -> int:
    """State blocks that a decoding request holds at once; one more when its place is known to a step only."""
    return num_spec_tokens + (3 if schedules_ahead else 2)


def states_for_one(num_spec_tokens: int, schedules_ahead: bool) -> int:
    """Most state blocks that one request alone can ever need: prefill, or the first decode step over its end."""
    ahead = num_spec_tokens + 6 if schedules_ahead else 0
    return max(states_per_request(num_spec_tokens, schedules_ahead), PREFILL_COLUMNS, ahead)


def plan_pools(
    *,
    cache_memory: int,
    mamba_fraction: float | None,
    kv_block_bytes: int,
    state_bytes: int,
    kv_block_tokens: int,
    mamba_block_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    num_spec_tokens: int,
    num_lookahead_tokens: int,
    schedules_ahead: bool,
) -> PoolPlan:
    """Divide `cache_memory` bytes.

    Without a fraction, states of the running requests come first, and the rest is split so that both pools hold the
    same number of cached tokens. Raises ConfigError when one request of `max_model_len` tokens does not fit.
    """
    per_request = states_per_request(num_spec_tokens, schedules_ahead)
    min_states = states_for_one(num_spec_tokens, schedules_ahead)
    steps_ahead = 2 if schedules_ahead else 1
    min_kv = cdiv(max_model_len + steps_ahead * num_spec_tokens + num_lookahead_tokens, kv_block_tokens)
    needed = (min_states + 1) * state_bytes + (min_kv + 1) * kv_block_bytes
    if cache_memory < needed:
        fitting_kv = (cache_memory - (min_states + 1) * state_bytes) // kv_block_bytes - 1
        fitting_len = fitting_kv * kv_block_tokens - steps_ahead * num_spec_tokens - num_lookahead_tokens
        remedy = f"use --max-model-len {fitting_len} or more --cache-memory" if fitting_len > 0 else "use more of it"
        raise ConfigError(
            f"--cache-memory {cache_memory}: one request of --max-model-len {max_model_len} tokens needs {needed} "
            f"bytes ({min_states} states of {state_bytes}, {min_kv} KV blocks of {kv_block_bytes}, two null blocks); "
            f"{remedy}"
        )
    usable = cache_memory - state_bytes - kv_block_bytes
    if mamba_fraction is None:
        running = min(max_num_seqs * per_request, (usable - min_kv * kv_block_bytes) // state_bytes)
        running = max(running, min_states)
        rest = usable - running * state_bytes
        pair_bytes = state_bytes + mamba_block_tokens // kv_block_tokens * kv_block_bytes
        num_states = running + min(rest // pair_bytes, max(0, rest - min_kv * kv_block_bytes) // state_bytes)
    else:
        num_states = int(usable * mamba_fraction) // state_bytes
    num_kv = (usable - num_states * state_bytes) // kv_block_bytes
    if num_states < min_states or num_kv < min_kv:
        raise ConfigError(
            f"--mamba-cache-fraction {mamba_fraction}: gives {num_states} states (one request needs {min_states}) and "
            f"{num_kv} KV blocks (one request of --max-model-len {max_model_len} tokens needs {min_kv})"
        )
    return PoolPlan(num_kv + 1, num_states + 1, max(1, min(max_num_seqs, num_states // per_request)))


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def describe_pools(
    plan: PoolPlan,
    *,
    kv_block_bytes: int,
    state_bytes: int,
    kv_block_tokens: int,
    mamba_block_tokens: int,
    num_spec_tokens: int,
    schedules_ahead: bool,
    prefix_caching: bool,
) -> list[str]:
    """Lines for people: what the pools hold and who fits."""
    kv_bytes, mamba_bytes = plan.num_kv_blocks * kv_block_bytes, plan.num_mamba_blocks * state_bytes
    per_request = states_per_request(num_spec_tokens, schedules_ahead)
    lines = [
        f"KV pool: {plan.num_kv_blocks - 1:,} blocks of {kv_block_tokens} tokens "
        f"({(plan.num_kv_blocks - 1) * kv_block_tokens:,} tokens), {mebibytes(kv_bytes)}",
        f"state pool: {plan.num_mamba_blocks - 1:,} states of {mebibytes(state_bytes)}, {mebibytes(mamba_bytes)}",
        f"running requests: up to {plan.max_num_seqs}, each with {per_request} states",
    ]
    if prefix_caching:
        lines.append(
            f"prefix cache: on, states kept every {mamba_block_tokens} tokens; "
            f"the smallest prompt that can hit has {mamba_block_tokens + 1} tokens"
        )
    else:
        lines.append("prefix cache: off")
    return lines
