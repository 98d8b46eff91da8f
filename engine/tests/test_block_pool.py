"""A block is free, cached or held, never two of them, and blocks leave in the promised order."""

import random

import pytest

from mambalign.engine.block_pool import BlockPool, PoolExhausted


def key(i: int) -> bytes:
    return bytes([i])


def cached(pool: BlockPool, *keys: int) -> list[int]:
    """Blocks published and released under `keys`, the first of them used least recently."""
    blocks = [pool.allocate() for _ in keys]
    for block, i in zip(blocks, keys, strict=True):
        assert pool.publish(block, key(i))
        pool.release(block)
    return blocks


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool("test", 4)
    assert sorted(pool.allocate() for _ in range(pool.num_usable)) == [1, 2, 3]
    with pytest.raises(PoolExhausted):
        pool.allocate()
    pool.check({1: 1, 2: 1, 3: 1})


def test_last_freed_is_taken_first() -> None:
    pool = BlockPool("test", 5)
    blocks = [pool.allocate() for _ in range(3)]
    pool.release(blocks[0])
    pool.release(blocks[1])
    assert [pool.allocate(), pool.allocate()] == [blocks[1], blocks[0]]


def test_cached_blocks_leave_by_last_use_and_only_when_nothing_is_free() -> None:
    evicted: list[bytes] = []
    pool = BlockPool("test", 5, evicted.append)
    first, second, third = cached(pool, 1, 2, 3)
    pool.touch(first)
    free = pool.allocate()
    assert free not in (first, second, third) and not evicted
    assert [pool.allocate() for _ in range(3)] == [second, third, first]
    assert evicted == [key(2), key(3), key(1)]
    assert pool.lookup(key(1)) is None and pool.num_cached == 0


def test_demoted_leaves_first_but_not_before_free_ones() -> None:
    evicted: list[bytes] = []
    pool = BlockPool("test", 5, evicted.append)
    _, second, _ = cached(pool, 1, 2, 3)
    pool.demote(second)
    assert pool.allocate() != second and not evicted
    assert pool.allocate() == second and evicted == [key(2)]


def test_holders_are_counted() -> None:
    pool = BlockPool("test", 3)
    (block,) = cached(pool, 1)
    pool.retain(block)
    pool.retain(block)
    assert pool.num_free == 1
    pool.release(block)
    pool.check({block: 1})
    pool.release(block)
    pool.check({})
    assert pool.num_free == 2 and pool.lookup(key(1)) == block


def test_touch_and_demote_leave_a_held_block_alone() -> None:
    pool = BlockPool("test", 3)
    (block,) = cached(pool, 1)
    pool.retain(block)
    pool.touch(block)
    pool.demote(block)
    pool.check({block: 1})
    pool.allocate()
    with pytest.raises(PoolExhausted):
        pool.allocate()


def test_second_of_a_kind_stays_private() -> None:
    pool = BlockPool("test", 4)
    (block,) = cached(pool, 1)
    twin = pool.allocate()
    assert not pool.publish(twin, key(1))
    pool.release(twin)
    assert pool.lookup(key(1)) == block and pool.allocate() == twin


def test_forgotten_block_is_free_once_nobody_holds_it() -> None:
    pool = BlockPool("test", 4)
    held, idle = cached(pool, 1, 2)
    pool.retain(held)
    pool.forget(key(1))
    pool.forget(key(2))
    pool.forget(key(3))
    pool.check({held: 1})
    assert pool.num_cached == 0 and pool.allocate() == idle
    pool.release(held)
    assert pool.allocate() == held


def test_misuse_is_an_assertion() -> None:
    pool = BlockPool("test", 4)
    block = pool.allocate()
    pool.publish(block, key(1))
    with pytest.raises(AssertionError, match="published already"):
        pool.publish(block, key(2))
    pool.release(block)
    for call in (pool.release, lambda b: pool.publish(b, key(3))):
        with pytest.raises(AssertionError, match="nobody holds"):
            call(block)
    with pytest.raises(AssertionError, match="free block"):
        pool.retain(3)


def test_check_finds_a_lost_holder() -> None:
    pool = BlockPool("test", 4)
    block = pool.allocate()
    pool.check({block: 1})
    with pytest.raises(AssertionError, match="requests say"):
        pool.check({})


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_books(seed: int) -> None:
    """Against a list that is in order of eviction by construction."""
    rng = random.Random(seed)
    evicted: list[bytes] = []
    pool = BlockPool("test", 7, evicted.append)
    holders: dict[int, int] = {}
    order: list[int] = []  # idle cached blocks, next to be evicted first
    for i in range(200):
        action, block = rng.choice(["take", "drop", "drop", "publish", "hit", "touch", "demote"]), 0
        held = [b for b, k in holders.items() if k]
        if action == "take" and pool.num_free:
            num_before, victim = len(evicted), order[0] if order and pool.num_free == len(order) else None
            block = pool.allocate()
            assert victim in (None, block) and len(evicted) - num_before == (victim is not None)
            order = [b for b in order if b != block]
            holders[block] = 1
        elif action == "drop" and held:
            block = rng.choice(held)
            holders[block] -= 1
            pool.release(block)
            order += [block] if not holders[block] and block in pool.published() else []
        elif action == "publish" and held:
            block = rng.choice(held)
            if block not in pool.published():
                pool.publish(block, key(i))
        elif order and action in ("hit", "touch", "demote"):
            block = rng.choice(order)
            order.remove(block)
            if action == "hit":
                pool.retain(block)
                holders[block] = 1
            else:
                getattr(pool, action)(block)
                order.insert(len(order) if action == "touch" else 0, block)
        pool.check({b: k for b, k in holders.items() if k})
