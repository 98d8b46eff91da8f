"""The tree of prefixes: what a lookup finds, which states are kept, and what is lost with an evicted block."""

import pytest

from mambalign.engine.block_pool import BlockPool
from mambalign.engine.prefix_cache import HEADER_TOKENS, Hit, PrefixCache
from mambalign.engine.request import Request
from mambalign.worker.sampling_params import SamplingParams

KV, BLOCK = 4, 8


def make_cache(num_kv_blocks: int = 40, num_mamba_blocks: int = 20) -> PrefixCache:
    return PrefixCache(BlockPool("kv", num_kv_blocks), BlockPool("mamba", num_mamba_blocks), KV, BLOCK)


def make_request(token_ids: list[int], salt: str = "") -> Request:
    return Request("r", token_ids, SamplingParams(), cache_salt=salt)


def text(num_tokens: int, *changed: int) -> list[int]:
    """Tokens 0, 1, 2, ... with those at the positions `changed` replaced."""
    return [1000 + i if i in changed else i for i in range(num_tokens)]


def fill(
    cache: PrefixCache, token_ids: list[int], boundaries: tuple[int, ...] = (), salt: str = "", is_tested: bool = True
) -> Request:
    """Publish a text's full KV blocks and the states at `boundaries`, and let go of all."""
    request = make_request(token_ids, salt)
    request.kv_blocks = [cache.kv_pool.allocate() for _ in range(len(token_ids) // KV)]
    cache.publish_kv(request, len(token_ids), is_tested)
    for boundary in boundaries:
        block = cache.mamba_pool.allocate()
        cache.publish_state(request, boundary, block, is_tested)
        cache.mamba_pool.release(block)
    for block in reversed(request.kv_blocks):
        cache.kv_pool.release(block)
    cache.check()
    return request


def lookup(cache: PrefixCache, token_ids: list[int], salt: str = "") -> tuple[int, int]:
    hit = cache.lookup(make_request(token_ids, salt))
    return hit.num_tokens, hit.num_matched_tokens


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, 0), (7, 0), (8, 0), (9, 8), (15, 8), (16, 8), (17, 16), (23, 16), (24, 16), (25, 24), (40, 24)],
)
def test_hit_is_the_last_boundary_before_the_last_token(num_tokens: int, expected: int) -> None:
    cache = make_cache()
    fill(cache, text(24), (8, 16, 24))
    assert lookup(cache, text(num_tokens))[0] == expected


def test_a_state_without_kv_or_kv_without_a_state_is_no_hit() -> None:
    cache = make_cache()
    fill(cache, text(22), (16,))
    assert lookup(cache, text(22)) == (16, 20)
    assert lookup(cache, text(15)) == (0, 12)
    assert lookup(cache, text(22, 14)) == (0, 12)
    assert lookup(cache, text(22, 0)) == (0, 0)


def test_salts_share_nothing() -> None:
    cache = make_cache()
    fill(cache, text(16), (8, 16), salt="a")
    assert lookup(cache, text(17), "a") == (16, 16)
    assert lookup(cache, text(17)) == lookup(cache, text(17), "b") == (0, 0)


def test_lookup_changes_nothing() -> None:
    cache = make_cache()
    fill(cache, text(16), (16,))
    before = (cache.kv_pool.published(), cache.mamba_pool.published(), list(cache.kv_pool._cached))
    lookup(cache, text(17))
    assert before == (cache.kv_pool.published(), cache.mamba_pool.published(), list(cache.kv_pool._cached))


@pytest.mark.parametrize(
    ("num_tokens", "hit", "expected"),
    [
        (7, Hit(0, 0), []),
        (8, Hit(0, 0), [8]),
        (9, Hit(0, 0), [8]),
        (16, Hit(0, 0), [8, 16]),
        (48 + HEADER_TOKENS - 1, Hit(0, 0), [48, 56]),  # B = 8: the last boundary is at 56, 7 tokens from the end
        (40, Hit(0, 20), [16, 32, 40]),  # junction inside
        (40, Hit(8, 12), [32, 40]),  # the junction is the hit itself
        (40, Hit(32, 40), [40]),
        (41, Hit(40, 40), []),
    ],
)
def test_boundaries_to_keep(num_tokens: int, hit: Hit, expected: list[int]) -> None:
    assert make_cache().boundaries_to_keep(make_request(text(num_tokens)), hit) == expected


def test_no_boundary_before_a_last_one_that_no_header_reaches() -> None:
    cache = PrefixCache(BlockPool("kv", 4), BlockPool("mamba", 4), 16, 32)
    for num_tokens, expected in ((64 + HEADER_TOKENS - 1, [32, 64]), (64 + HEADER_TOKENS, [64])):
        assert cache.boundaries_to_keep(make_request(text(num_tokens)), Hit(0, 0)) == expected


def hashes_of(cache: PrefixCache, token_ids: list[int]) -> list[bytes]:
    request = make_request(token_ids)
    cache.extend_hashes(request)
    return request.block_hashes


def evict(cache: PrefixCache, hash: bytes) -> None:
    """Take blocks until that one goes, as the first of all cached ones."""
    cache.kv_pool.demote(cache.kv_pool.lookup(hash))
    while cache.kv_pool.lookup(hash) is not None:
        cache.kv_pool.allocate()
    cache.check()


def test_evicting_a_kv_block_drops_all_behind_it() -> None:
    cache = make_cache()
    fill(cache, text(16), (8, 16))
    fill(cache, text(24, 12), (24,))  # shares three blocks, then three of its own
    assert (cache.kv_pool.num_cached, cache.mamba_pool.num_cached) == (7, 3)
    evict(cache, hashes_of(cache, text(24))[1])
    assert (cache.kv_pool.num_cached, cache.mamba_pool.num_cached) == (1, 0)
    assert lookup(cache, text(24)) == (0, 4)


def test_a_dropped_branch_leaves_its_sibling() -> None:
    cache = make_cache()
    fill(cache, text(16), (16,))
    fill(cache, text(16, 9), (16,))
    evict(cache, hashes_of(cache, text(16))[2])
    assert lookup(cache, text(17)) == (0, 8)
    assert lookup(cache, text(17, 9)) == (16, 16)


def test_a_text_that_was_dropped_under_its_holder_is_published_again_whole() -> None:
    """A held block's hash goes with its prefix; the holder's own copies close the gap at its next block."""
    cache = make_cache(num_kv_blocks=10)
    fill(cache, text(8))
    request = make_request(text(16))
    request.kv_blocks = [cache.kv_pool.allocate() for _ in range(4)]  # the first two are private copies
    cache.publish_kv(request, 12)
    assert cache.kv_pool.lookup(request.block_hashes[0]) != request.kv_blocks[0]
    evict(cache, request.block_hashes[0])
    assert cache.kv_pool.num_cached == 0
    cache.publish_kv(request, 16)
    cache.check()
    assert [cache.kv_pool.lookup(hash) for hash in request.block_hashes] == request.kv_blocks


def test_matched_copies_that_are_computed_again_stay_young() -> None:
    """Behind the hit the KV is computed again, yet the cached copies must not age before what they lead to."""
    cache = make_cache(num_kv_blocks=9)
    fill(cache, text(16), (8,))
    fill(cache, text(16, 0))
    request = make_request(text(16))
    hit = cache.lookup(request)
    assert hit == Hit(8, 16)
    for hash in request.block_hashes[:2]:
        cache.kv_pool.retain(cache.kv_pool.lookup(hash))
    cache.touch_matched(request, hit)
    for _ in range(4):  # evicts the other text
        cache.kv_pool.allocate()
    assert lookup(cache, text(16)) == (8, 16) and lookup(cache, text(16, 0)) == (0, 0)
    cache.kv_pool.allocate()
    assert lookup(cache, text(16)) == (8, 12)  # from the end
    cache.check()


def test_a_second_state_refreshes_the_first() -> None:
    cache = make_cache(num_mamba_blocks=4)
    first = fill(cache, text(16), (8, 16))
    block = cache.mamba_pool.allocate()
    assert cache.publish_state(first, 8, block) is None
    cache.mamba_pool.release(block)
    cache.mamba_pool.allocate()
    cache.mamba_pool.allocate()
    assert lookup(cache, text(17)) == (8, 16)


def test_superseded_state_goes_first() -> None:
    cache = make_cache(num_mamba_blocks=3)
    request = fill(cache, text(16), (8, 16))
    cache.supersede_state(cache.state_hash(request, 16))
    cache.mamba_pool.allocate()
    assert lookup(cache, text(17)) == (8, 16)
    cache.supersede_state(b"gone")


def test_a_failed_text_takes_what_nothing_proves_and_no_more() -> None:
    cache = make_cache()
    fill(cache, text(8), (8,))
    failed = fill(cache, text(24), (16, 24), is_tested=False)
    proved = fill(cache, text(24, 9), (16, 24), is_tested=False)
    fill(cache, text(32, 20), (32,))  # goes on from an untested prefix, which its own sampled token would prove
    cache.mark_tested(proved)
    cache.forget_untested(failed)
    cache.check()
    assert lookup(cache, text(25)) == (8, 8) == lookup(cache, text(33, 20))
    assert lookup(cache, text(25, 9)) == (24, 24)
    cache.forget_untested(proved)
    assert lookup(cache, text(25, 9)) == (24, 24)


def test_a_state_that_comes_later_than_its_kv_is_tested_by_itself() -> None:
    cache = make_cache()
    fill(cache, text(24))
    failed = fill(cache, text(24), (16,), is_tested=False)
    assert lookup(cache, text(24)) == (16, 24)
    cache.forget_untested(failed)
    cache.check()
    assert lookup(cache, text(24)) == (0, 12)


def test_reset_forgets_everything() -> None:
    cache = make_cache()
    fill(cache, text(24), (8, 24))
    cache.reset()
    cache.check()
    assert lookup(cache, text(25)) == (0, 0)
    assert (cache.kv_pool.num_free, cache.mamba_pool.num_free) == (39, 19)
    fill(cache, text(24), (8, 24))
    assert lookup(cache, text(25)) == (24, 24)
