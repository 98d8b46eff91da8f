"""Faults that the quick profile must find: each a replacement of exact source text in a copy of the package.

All run on a CPU, where the torch reference of a migration kernel stands for it. Those marked INTERPRETED are in the
Triton kernels, which then run through Triton's interpreter.
"""

from dataclasses import dataclass, field

INTERPRETED = {"TRITON_INTERPRET": "1"}
FAR_BLOCKS = ("-m", "pytest", "-q", "-x", "kernels/tests/test_precopy_mamba_align.py", "-k", "past_two_to_the_31")
STEP_ADDRESSES = ("-m", "pytest", "-q", "-x", "kernels/tests/test_step_addresses.py")


@dataclass(frozen=True)
class Mutant:
    """`old` must be in the file exactly `count` times. `command`: what must fail, if not the quick profile."""

    name: str
    path: str
    old: str
    new: str
    count: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()


COLUMNS, MIGRATION = "worker/mamba_columns.py", "worker/mamba_utils.py"
PRECOPY, POSTPROCESS = "kernels/precopy_mamba_align.py", "kernels/postprocess_mamba.py"
PREPROCESS, COPY = "kernels/preprocess_mamba_align.py", "kernels/mamba_state_copy.py"
SCHEDULER, BLOCKS = "engine/scheduler.py", "engine/request_blocks.py"
CACHE, POOL = "engine/prefix_cache.py", "engine/block_pool.py"
STEP, ROWS, ADDRESSES = "worker/model_step.py", "worker/forward_batch.py", "kernels/step_addresses.py"

MUTANTS = [
    Mutant(
        "token bias one short on V1",
        COLUMNS,
        "PrecopyInfo(c if moves else -1, dest, a - 1)",
        "PrecopyInfo(c if moves else -1, dest, max(a - 2, 0))",
    ),
    Mutant(
        "token bias one short on V2",
        PREPROCESS,
        "token_bias[slots] = accepted - 1",
        "token_bias[slots] = (accepted - 2).clamp(min=0)",
    ),
    Mutant(
        "token bias one short in the kernel",
        PREPROCESS,
        "tl.store(p_token_bias + slots, accepted - 1, mask=live)",
        "tl.store(p_token_bias + slots, tl.maximum(accepted - 2, 0), mask=live)",
        environment=INTERPRETED,
    ),
    Mutant(
        "num_accepted not reset by a move on V1",
        MIGRATION,
        "    input_batch.num_accepted[[row for row, _ in moves]] = 1\n",
        "",
    ),
    Mutant(
        "num_accepted not reset by a move on V2",
        PREPROCESS,
        "num_accepted[slots] = torch.where(moves, 1, accepted)",
        "num_accepted[slots] = accepted",
    ),
    Mutant(
        "num_accepted of another request after compaction",
        "worker/input_batch.py",
        "            self.num_accepted[row] = self.num_accepted[last]\n",
        "",
    ),
    Mutant(
        "num_accepted left in a slot by the request before",
        "worker/slot_batch.py",
        "        self.num_accepted[slot].fill_(1)  # an assignment would copy a host value, and wait\n",
        "",
    ),
    Mutant(
        "idx_mapping ignored",
        PRECOPY,
        "slot = row if idx_mapping is None else int(idx_mapping[row])",
        "slot = row",
    ),
    Mutant(
        "idx_mapping ignored in the kernel",
        PRECOPY,
        "            slot = tl.load(p_idx_mapping + row)\n",
        "            slot = row\n",
        environment=INTERPRETED,
    ),
    Mutant(
        "DS shifted like SD, by one slice of the block",
        COPY,
        "    if is_conv and conv_state_dim_first:\n",
        "    if False:\n",
    ),
    Mutant(
        "32-bit block offsets in the kernel",
        COPY,
        "source, dest = base + source_block * block_stride + offset, base + dest_block * block_stride + offset",
        "source = base + (source_block * block_stride).to(tl.int32) + offset\n"
        "    dest = base + (dest_block * block_stride).to(tl.int32) + offset",
        command=FAR_BLOCKS,
    ),
    Mutant(
        "carry not moved",
        "worker/state_cache.py",
        'return states if self.carry is None else [*states, MambaState(self.carry, "carry")]',
        "return states",
    ),
    Mutant(
        "boundary kept from one token too late",
        POSTPROCESS,
        "dest, bias = boundary // block_tokens - 1, boundary - n - 1",
        "dest, bias = boundary // block_tokens - 1, boundary - n",
        count=2,
    ),
    Mutant(
        "running block published in place of the boundary's",
        BLOCKS,
        "request.mamba_blocks[crossed.dest_column]",
        "request.mamba_blocks[crossed.source_column]",
    ),
    Mutant(
        "published before it is computed",
        SCHEDULER,
        "        ends_inside = end < request.num_tokens and not is_decode\n",
        "        ends_inside = end < request.num_tokens and not is_decode\n"
        "        if self.limits.enable_prefix_caching:\n"
        "            self.blocks.cache.publish_kv(request, min(end, request.num_tokens))\n",
    ),
    Mutant(
        "published past the stop",
        BLOCKS,
        "num_committed = min(request.num_computed_tokens, self.cache.num_cacheable(request))",
        "num_committed = request.num_computed_tokens",
    ),
    Mutant(
        "first column by the KV group's block size",
        BLOCKS,
        "first_column(hit.num_tokens, self.limits.mamba_block_tokens)",
        "first_column(hit.num_tokens, self.limits.kv_block_tokens)",
    ),
    Mutant(
        "running column freed",
        BLOCKS,
        "if column < first and column != request.running_column:",
        "if column < first:",
    ),
    Mutant(
        "columns for the lowest place only, with a step in flight",
        BLOCKS,
        "slack = outlook.most - n",
        "slack = 0",
    ),
    Mutant(
        "no KV slots for the drafter's own tokens",
        BLOCKS,
        "end = outlook.most + num_tokens + self.limits.num_lookahead_tokens",
        "end = outlook.most + num_tokens",
    ),
    Mutant(
        "a cached block that is held can be evicted",
        POOL,
        "        self._cached.pop(block, None)\n        self._num_holders[block] += 1\n",
        "        self._num_holders[block] += 1\n",
    ),
    Mutant(
        "salt left out of the hash",
        CACHE,
        "hashlib.blake2b(request.cache_salt.encode(), digest_size=16)",
        'hashlib.blake2b(b"", digest_size=16)',
    ),
    Mutant(
        "hit that leaves nothing to compute",
        CACHE,
        "boundary = min(num_matched, request.num_tokens - 1) // step * step",
        "boundary = min(num_matched, request.num_tokens) // step * step",
    ),
    Mutant(
        "junction one block early",
        CACHE,
        "wanted = {last, hit.num_matched_tokens // step * step}",
        "wanted = {last, (hit.num_matched_tokens // step - 1) * step}",
    ),
    Mutant(
        "first chunk reads a state",
        ADDRESSES,
        "temporal_block = live.masked_fill(num_computed == 0, NOWHERE)",
        "temporal_block = live",
    ),
    Mutant(
        "conv window one slot further",
        ADDRESSES,
        "return state_block.int(), conv_block, temporal_block, bias,",
        "return state_block.int(), conv_block, temporal_block, num_accepted,",
    ),
    Mutant(
        "deferral one token too far",
        "kernels/rows.py",
        "(num_computed + 2 * num_spec_tokens + 1) // block_tokens",
        "(num_computed + 2 * num_spec_tokens) // block_tokens",
    ),
    Mutant(
        "deferral one token too far in the kernel",
        ADDRESSES,
        "    ahead = 2 * num_spec_tokens + 1\n",
        "    ahead = 2 * num_spec_tokens\n",
        command=STEP_ADDRESSES,
    ),
    Mutant(
        "deferral of the last step judged by where this one begins",
        ADDRESSES,
        "may_defer(num_computed - num_accepted, defer_within, num_spec_tokens)",
        "may_defer(num_computed, defer_within, num_spec_tokens)",
    ),
    Mutant(
        "a prompt's last token leaves its inputs",
        ADDRESSES,
        "may_defer(num_computed, defer_within, num_spec_tokens) & (is_decode != 0)",
        "may_defer(num_computed, defer_within, num_spec_tokens)",
    ),
    Mutant(
        "a kept draft not run again",
        ADDRESSES,
        "Deferral(defers.int(), replays, replay_block)",
        "Deferral(defers.int(), (replays - 1).clamp(min=0), replay_block)",
    ),
    Mutant(
        "the first draft run again in place of each",
        "kernels/cpu/scan.py",
        "np.int64(replay_block[row, i])",
        "np.int64(replay_block[row, 0])",
    ),
    Mutant(
        "a key behind the text is read",
        ROWS,
        "            context_len=rows.num_computed,\n",
        "            context_len=rows.num_computed + 1,\n",
    ),
    Mutant(
        "hole in the drafter's KV behind a cached prefix",
        STEP,
        "if self.mtp is not None and len(rows.layout.resumed):",
        "if False:",
    ),
    Mutant(
        "penalties of a run do not see its drafts",
        STEP,
        "SampleRow(params, prompt, output + drafts[:j], request.choice, allowed)",
        "SampleRow(params, prompt, output, request.choice, allowed)",
    ),
    Mutant(
        "noise of a run by its first position",
        STEP,
        "positions = rows.num_computed[layout.row_of_token[at]] + layout.offset_of_token[at] + 1",
        "positions = rows.num_computed[layout.row_of_token[at]] + 1",
    ),
    Mutant(
        "drafts behind a stop counted as accepted",
        SCHEDULER,
        "min(len(result.token_ids) - 1, len(kept))",
        "len(result.token_ids) - 1",
    ),
    Mutant(
        "a grammar goes on from drafts that were not kept",
        "worker/grammar.py",
        "            self._matcher.rollback(num_ahead)\n",
        "            pass\n",
    ),
    Mutant(
        "masks of a run by its first position",
        "worker/grammar.py",
        "            masks[i] = mask\n",
        "            masks[i] = mask if i == 0 else masks[0]\n",
    ),
]
