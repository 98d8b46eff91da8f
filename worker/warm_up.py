"""The largest step, run once before there are caches: what it needs beside them, and its kernels compiled."""

from dataclasses import replace

import torch

from mambalign.worker.batch import ScheduledRow
from mambalign.worker.forward_batch import StepRows, lay_out
from mambalign.worker.mamba_columns import cdiv
from mambalign.worker.model_step import ModelStep, RunnerLimits
from mambalign.worker.state_cache import AttentionSpec, StateCache, StateSpec

KV_BLOCK_TOKENS = 16


@torch.inference_mode()
def measure_activations(
    model,
    attention_specs: list[AttentionSpec],
    state_specs: list[StateSpec],
    limits: RunnerLimits,
    num_tokens: int,
) -> int:
    """Peak bytes, beside weights and caches, of a prefill of `num_tokens` tokens and of the logits of a full batch."""
    num_kv_blocks = cdiv(num_tokens + limits.num_spec_tokens + 1, KV_BLOCK_TOKENS)
    device = model.embedding.device
    cache = StateCache.allocate(
        attention_specs,
        state_specs,
        num_kv_blocks=1 + num_kv_blocks,
        num_mamba_blocks=2,
        kv_block_tokens=KV_BLOCK_TOKENS,
        mamba_block_tokens=num_kv_blocks * KV_BLOCK_TOKENS,
        conv_layout="SD",
        conv_width=model.conv_width,
        num_spec_tokens=limits.num_spec_tokens,
        device=device,
    )
    step = ModelStep(model, cache, replace(limits, step_graphs=False), table_width=1)
    row = ScheduledRow(
        "", 0, 0, [0] * num_tokens, False, list(range(1, 1 + num_kv_blocks)), {0: 1}, [], 0, limits.by_chunk
    )
    layout = lay_out([row], cache, resumed=set())
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    rows = StepRows(layout, zero, zero, zero + 1, (zero + 1)[None], layout.token_ids)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hidden = step.forward(rows)
    if step.mtp is not None:
        step.propose_mtp(rows, hidden, layout.token_ids[:0], layout.query_len)
    model.compute_logits(hidden[: limits.max_num_seqs * (limits.num_spec_tokens + 1)]).argmax(-1)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del hidden, cache, step
    torch.cuda.empty_cache()
    return peak
