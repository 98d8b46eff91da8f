"""The blocks of both pools that requests hold: found, taken, published, given back. Knows no queue and no budget.

While a step is in flight a decode row's place is known between two bounds only: blocks are reserved for the highest,
and kept down to the lowest.
"""

from collections import Counter
from collections.abc import Collection

from mambalign.engine.block_pool import BlockPool
from mambalign.engine.prefix_cache import Hit, PrefixCache
from mambalign.engine.request import Outlook, Request
from mambalign.engine.scheduler_limits import SchedulerLimits
from mambalign.worker.batch import ScheduledRow
from mambalign.worker.mamba_columns import cdiv, decode_columns, first_column, next_column, postcopy


class RequestBlocks:
    """Owns both pools and the prefix cache over them. What a request holds stands in the request itself."""

    def __init__(self, limits: SchedulerLimits):
        self.limits = limits
        self.kv_pool = BlockPool("kv", limits.num_kv_blocks)
        self.mamba_pool = BlockPool("mamba", limits.num_mamba_blocks)
        self.cache = PrefixCache(
            self.kv_pool,
            self.mamba_pool,
            limits.kv_block_tokens,
            limits.mamba_block_tokens,
            prompts_only=limits.chunk_tokens is not None,
        )

    def admit(self, request: Request) -> Hit:
        """Hold the cached prefix and start the request's columns from it; `release` undoes it."""
        hit = self.cache.lookup(request) if self._looks_up(request) else Hit(0, 0)
        if self.limits.enable_prefix_caching:
            request.boundaries = self.cache.boundaries_to_keep(request, hit)
            self.cache.touch_matched(request, hit)
        request.num_computed_tokens = hit.num_tokens
        request.num_admitted_tokens = request.num_tokens
        request.running_column = first_column(hit.num_tokens, self.limits.mamba_block_tokens)
        for hash in request.block_hashes[: hit.num_tokens // self.limits.kv_block_tokens]:
            block = self.kv_pool.lookup(hash)
            self.kv_pool.retain(block)
            request.kv_blocks.append(block)
        if hit.num_tokens:
            block = self.mamba_pool.lookup(self.cache.state_hash(request, hit.num_tokens))
            self.mamba_pool.retain(block)
            request.mamba_blocks[request.running_column] = block
        return hit

    def miss_cause(self, request: Request, hit: Hit) -> str | None:
        """Why `admit` found nothing, one of `MISS_CAUSES`; None for a hit."""
        if hit.num_tokens:
            return None
        return self.cache.miss_cause(request, hit) if self._looks_up(request) else "disabled"

    def _looks_up(self, request: Request) -> bool:
        return self.limits.enable_prefix_caching and not request.lacks_prompt_logprobs

    def fits(self, request: Request) -> bool:
        """Whether there is KV for the whole known text: with less, a request would soon be preempted again."""
        num_kv = cdiv(request.num_tokens + self.limits.num_lookahead_tokens, self.limits.kv_block_tokens)
        return num_kv - len(request.kv_blocks) <= self.kv_pool.num_free

    def allocate(self, request: Request, outlook: Outlook, num_tokens: int) -> bool:
        """Give the request every block that a step of `num_tokens` tokens can need, or nothing and False."""
        end = outlook.most + num_tokens + self.limits.num_lookahead_tokens
        num_kv = max(0, cdiv(end, self.limits.kv_block_tokens) - len(request.kv_blocks))
        columns = [c for c in self._columns(request, outlook, num_tokens) if c not in request.mamba_blocks]
        if num_kv > self.kv_pool.num_free or len(columns) > self.mamba_pool.num_free:
            return False
        request.kv_blocks += [self.kv_pool.allocate() for _ in range(num_kv)]
        for column in columns:
            request.mamba_blocks[column] = self.mamba_pool.allocate()
        return True

    def _columns(self, request: Request, outlook: Outlook, num_tokens: int) -> list[int]:
        """Mamba columns that a step of `num_tokens` tokens can write, or must keep for a copy."""
        n, column, size = outlook.least, outlook.running_column, self.limits.mamba_block_tokens
        if outlook.is_decode:
            slack = outlook.most - n
            return list(decode_columns(n, column, num_tokens, size, self.limits.num_spec_tokens, slack))
        asked = [m // size - 1 for m in request.boundaries_within(n, n + num_tokens)]
        return sorted({next_column(column, n, num_tokens, size), *asked})

    def publish(self, request: Request, row: ScheduledRow, n: int, num_final: int) -> None:
        """Cache what a step completed that took `num_final` tokens from `n`, as far as the text goes.

        A stop may have cut the last ones off.
        """
        size = self.limits.mamba_block_tokens
        num_committed = min(request.num_computed_tokens, self.cache.num_cacheable(request))
        self.cache.publish_kv(request, num_committed, row.samples)
        if not row.is_decode:
            for boundary in row.boundaries:
                self.cache.publish_state(request, boundary, request.mamba_blocks[boundary // size - 1], row.samples)
            if row.samples:
                self.cache.mark_tested(request)
            return
        crossed = postcopy(request.running_column, n, num_final, size)
        if crossed is None or crossed.boundary > num_committed:
            return
        hash = self.cache.publish_state(request, crossed.boundary, request.mamba_blocks[crossed.dest_column])
        if request.decode_checkpoint is not None:
            self.cache.supersede_state(request.decode_checkpoint)
        request.decode_checkpoint = hash

    def release_behind(self, request: Request) -> None:
        """Give back the columns that no later step of the request can read."""
        first = request.num_computed_tokens // self.limits.mamba_block_tokens
        for column in sorted(request.mamba_blocks):
            if column < first and column != request.running_column:
                self.mamba_pool.release(request.mamba_blocks.pop(column))

    def release(self, request: Request) -> None:
        """Give everything back, the end of the text first, so that it is evicted before what leads to it.

        What was computed, drafted or launched for the request is nothing without its blocks, and forgotten.
        """
        for block in reversed(request.kv_blocks):
            self.kv_pool.release(block)
        for column in sorted(request.mamba_blocks, reverse=True):
            self.mamba_pool.release(request.mamba_blocks[column])
        request.kv_blocks, request.mamba_blocks, request.boundaries = [], {}, []
        request.draft_token_ids = []
        request.in_flight.clear()
        request.num_computed_tokens, request.running_column = 0, -1

    def check(self, requests: Collection[Request]) -> None:
        """Walk both pools and the tree; raises AssertionError where they are not what the living `requests` hold."""
        self.kv_pool.check(Counter(block for request in requests for block in request.kv_blocks))
        self.mamba_pool.check(Counter(block for request in requests for block in request.mamba_blocks.values()))
        self.cache.check()
