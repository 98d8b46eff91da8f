"""A scheduler's prefix cache held against plain sets of texts, at every call: what brute force says it must do.

A text is a salt and the tokens of a prefix. The watch knows which text each hash stands for, so that the sets of cached
texts can be written down at any moment, whatever was evicted before.
"""

from collections import Counter
from collections.abc import Callable

from mambalign.engine.block_pool import BlockPool
from mambalign.engine.prefix_cache import HEADER_TOKENS, Hit
from mambalign.engine.request import Request
from mambalign.engine.scheduler import Scheduler
from mambalign.worker.batch import ScheduledRow

Text = tuple[str, tuple[int, ...]]  # salt, tokens
OnPublish = Callable[[BlockPool, int, Text], None]  # pool, block, the text that the block ends


class CacheWatch:
    """Asserts, as the scheduler runs: one text a hash; each lookup finds all there is; each step publishes all it must.

    `on_publish` is called for each block that becomes cached, once its step is committed.
    """

    def __init__(self, scheduler: Scheduler, on_publish: OnPublish = lambda pool, block, text: None):
        self.scheduler = scheduler
        self.names: dict[bytes, Text] = {}
        self.crossings: Counter[int] = Counter()  # boundaries that decode rows kept, by their place in the run
        self._on_publish = on_publish
        self._hashes: dict[Text, bytes] = {}
        self._num_noted: dict[Request, int] = {}  # hashes of a request that are in `names`
        self._new_states: set[Text] = set()  # of the row that is booked
        blocks, cache = scheduler.blocks, scheduler.blocks.cache
        self._extend_hashes, cache.extend_hashes = cache.extend_hashes, self._noting_extend_hashes
        self._lookup, cache.lookup = cache.lookup, self._checked_lookup
        self._boundaries, cache.boundaries_to_keep = cache.boundaries_to_keep, self._checked_boundaries
        self._publish, blocks.publish = blocks.publish, self._checked_publish
        for pool in (blocks.kv_pool, blocks.mamba_pool):
            self._watch(pool)

    def _watch(self, pool: BlockPool) -> None:
        publish = pool.publish

        def noting(block: int, hash: bytes) -> bool:
            is_new = publish(block, hash)
            if is_new:
                if pool is self.scheduler.blocks.mamba_pool:
                    self._new_states.add(self.names[hash])
                self._on_publish(pool, block, self.names[hash])
            return is_new

        pool.publish = noting

    def _noting_extend_hashes(self, request: Request) -> None:
        self._extend_hashes(request)
        size, hashes = self.scheduler.limits.kv_block_tokens, request.block_hashes
        assert len(hashes) == request.num_tokens // size
        for i in range(self._num_noted.get(request, 0), len(hashes)):
            text = (request.cache_salt, tuple(request.token_ids[: (i + 1) * size]))
            known = self.names.setdefault(hashes[i], text)
            assert known == text, f"one hash for two texts: {known} and {text}"
            assert self._hashes.setdefault(text, hashes[i]) == hashes[i], f"two hashes for {text}"
        self._num_noted[request] = len(hashes)

    def _num_cacheable(self, request: Request) -> int:
        """By chunks, a prompt's tokens only."""
        return request.num_tokens if self.scheduler.limits.chunk_tokens is None else request.num_prompt_tokens

    def cached(self, pool: BlockPool) -> set[Text]:
        """The texts whose last block `pool` has cached."""
        return {self.names[hash] for hash in pool.published().values()}

    def _checked_lookup(self, request: Request) -> Hit:
        hit = self._lookup(request)
        kv, states = self.cached(self.scheduler.blocks.kv_pool), self.cached(self.scheduler.blocks.mamba_pool)
        salt, tokens, step = request.cache_salt, tuple(request.token_ids), self.scheduler.limits.mamba_block_tokens
        size = self.scheduler.limits.kv_block_tokens
        ends = range(size, self._num_cacheable(request) + 1, size)
        missing = [end for end in ends if (salt, tokens[:end]) not in kv]
        match = max((end for end in ends if not missing or end < missing[0]), default=0)
        found = [m for m in range(step, min(match, len(tokens) - 1) + 1, step) if (salt, tokens[:m]) in states]
        expected = Hit(max(found, default=0), match)
        assert hit == expected, f"{request.request_id} finds {hit}; cached is {expected}"
        return hit

    def _checked_boundaries(self, request: Request, hit: Hit) -> list[int]:
        kept = self._boundaries(request, hit)
        step, num_tokens = self.scheduler.limits.mamba_block_tokens, self._num_cacheable(request)
        boundaries = range(step, num_tokens + 1, step)
        wanted = set(boundaries[-1:])
        if num_tokens % step < HEADER_TOKENS:
            wanted |= set(boundaries[-2:])
        wanted |= {m for m in boundaries if m <= hit.num_matched_tokens < m + step}  # the junction
        assert kept == sorted(m for m in wanted if m > hit.num_tokens), f"{request.request_id} keeps {kept} after {hit}"
        return kept

    def _checked_publish(self, request: Request, row: ScheduledRow, n: int, num_final: int) -> None:
        """After a row's step all full KV blocks of its committed text are cached, and the states asked for; no more."""
        limits, blocks = self.scheduler.limits, self.scheduler.blocks
        salt, tokens = request.cache_salt, tuple(request.token_ids)
        step, end = limits.mamba_block_tokens, min(n + num_final, self._num_cacheable(request))
        self._new_states.clear()
        self._publish(request, row, n, num_final)
        crossed = [m for m in range(step, end + 1, step) if m > n]
        if row.is_decode:
            assert len(crossed) <= 1
            self.crossings.update(m - n - 1 for m in crossed)
        expected = {(salt, tokens[:m]) for m in crossed if row.is_decode or m in request.boundaries}
        assert self._new_states <= expected, f"{request.request_id} publishes states that nobody asked for"
        for text in expected:
            assert blocks.mamba_pool.lookup(self._hashes[text]) is not None, f"no state at {len(text[1])}"
        for i in range(limits.kv_block_tokens, end + 1, limits.kv_block_tokens):
            assert blocks.kv_pool.lookup(self._hashes[salt, tokens[:i]]) is not None, f"no KV up to {i}"
