"""What the scheduler keeps up to date from step to step, computed again from nothing and compared."""

from mambalign.engine.block_pool import BlockPool
from mambalign.engine.prefix_cache import PrefixCache
from mambalign.engine.request import Request
from mambalign.engine.scheduler import Scheduler
from mambalign.engine.tests.cache_watch import CacheWatch, Text


def check_fresh(scheduler: Scheduler, watch: CacheWatch, requests: list[Request]) -> None:
    """AssertionError where a number or a tree is not what the texts alone make it. requests: all there ever were."""
    check_tree(scheduler, watch)
    for request in scheduler.requests.values():
        check_hashes(scheduler, request)
    for request in scheduler.running:
        check_columns(scheduler, request)
    check_counters(scheduler, requests)


def check_tree(scheduler: Scheduler, watch: CacheWatch) -> None:
    """The tree of cached KV prefixes is the one that the cached texts span."""
    size, cache = scheduler.limits.kv_block_tokens, scheduler.blocks.cache
    texts: dict[Text, bytes] = {watch.names[hash]: hash for hash in scheduler.blocks.kv_pool.published().values()}
    parents = {hash: texts[salt, tokens[:-size]] for (salt, tokens), hash in texts.items() if len(tokens) > size}
    assert cache._parent == parents, "the tree is not that of the cached texts"
    children: dict[bytes, set[bytes]] = {}
    for child, parent in parents.items():
        children.setdefault(parent, set()).add(child)
    assert cache._children == children, "the tree is not that of the cached texts"


def check_hashes(scheduler: Scheduler, request: Request) -> None:
    """A request's hashes, grown block by block, are those of its text hashed at once."""
    limits = scheduler.limits
    pools = (BlockPool("kv", 1), BlockPool("mamba", 1))
    fresh = Request("fresh", request.token_ids, request.params, cache_salt=request.cache_salt)
    PrefixCache(*pools, limits.kv_block_tokens, limits.mamba_block_tokens).extend_hashes(fresh)
    assert request.block_hashes == fresh.block_hashes[: len(request.block_hashes)]


def check_columns(scheduler: Scheduler, request: Request) -> None:
    """Between two steps a running request holds no column behind its text but the running one."""
    limits, n = scheduler.limits, request.num_computed_tokens
    first = n // limits.mamba_block_tokens
    behind = [column for column in request.mamba_blocks if column < first and column != request.running_column]
    assert not behind, f"{request.request_id} holds {behind} behind its {n} tokens"


def check_counters(scheduler: Scheduler, requests: list[Request]) -> None:
    """Totals are sums over the requests."""
    counters = scheduler.counters
    sums = {
        "generation_tokens": sum(request.num_output_tokens for request in requests),
        "draft_tokens": sum(request.num_draft_tokens for request in requests),
        "accepted_tokens": sum(request.num_accepted_tokens for request in requests),
        "preemptions": sum(request.num_preemptions for request in requests),
        "prefix_hits": sum(request.num_cached_tokens or 0 for request in requests),
    }
    assert {name: getattr(counters, name) for name in sums} == sums
    assert counters.accepted_tokens == sum(counters.accepted_per_position)
