"""One pool of equal blocks: who holds them, which are cached under a hash, and who is evicted next.

Knows nothing of tokens, requests or the other pool. A block is in exactly one of these states:

    free      no holder, no hash     taken first, the last one given back before all others
    cached    no holder, a hash      queued by last use: evicted when no free block is left
    held      holders, hash or none  in neither queue
"""

from collections import OrderedDict
from collections.abc import Callable

from mambalign.worker.mamba_columns import NULL_BLOCK


class PoolExhausted(Exception):
    """No block is left that nobody holds. The scheduler waits or preempts; nothing was taken."""


class BlockPool:
    """Blocks 1 .. num_blocks-1; block 0 is the null block of every table and never handed out.

    `on_evict(hash)` is called when a cached block loses its hash because its memory is needed.
    """

    def __init__(self, name: str, num_blocks: int, on_evict: Callable[[bytes], None] = lambda hash: None):
        self.name = name
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self._free = list(range(num_blocks - 1, 0, -1))  # taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # evicted from the front
        self._num_holders = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._hash_of)

    def counts(self) -> dict[str, int]:
        """Blocks by state."""
        held = self.num_usable - self.num_free
        return {"held": held, "cached": len(self._cached), "free": len(self._free)}

    def allocate(self) -> int:
        """Take a block with one holder and no hash, evicting the least recently used cached block if need be."""
        if self._free:
            block = self._free.pop()
            self._num_holders[block] = 1
            return block
        if not self._cached:
            raise PoolExhausted(self.name)
        block, _ = self._cached.popitem(last=False)
        self._num_holders[block] = 1
        self.on_evict(self._drop_hash(block))
        return block

    def retain(self, block: int) -> None:
        """Add a holder to a cached or held block."""
        assert self._num_holders[block] or block in self._hash_of, f"{self.name}: retain of free block {block}"
        self._cached.pop(block, None)
        self._num_holders[block] += 1

    def release(self, block: int) -> None:
        """Drop a holder. The last one leaves the block most recently used if cached, else next to be taken."""
        assert self._num_holders[block] > 0, f"{self.name}: release of block {block}, which nobody holds"
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            self._enqueue(block)

    def publish(self, block: int, hash: bytes) -> bool:
        """Cache a held block under `hash`; False when another block has it, and this one stays private."""
        assert self._num_holders[block] > 0, f"{self.name}: publish of block {block}, which nobody holds"
        if hash in self._block_of:
            return False
        assert block not in self._hash_of, f"{self.name}: block {block} is published already"
        self._hash_of[block] = hash
        self._block_of[hash] = block
        return True

    def lookup(self, hash: bytes) -> int | None:
        return self._block_of.get(hash)

    def touch(self, block: int) -> None:
        """Make a cached block the most recently used."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def demote(self, block: int) -> None:
        """Make a cached block the next to be evicted."""
        if block in self._cached:
            self._cached.move_to_end(block, last=False)

    def forget(self, hash: bytes) -> None:
        """Drop a hash that can no longer be reached; the block is free as soon as nobody holds it."""
        block = self._block_of.get(hash)
        if block is not None:
            self._drop_hash(block)
            if self._num_holders[block] == 0:
                del self._cached[block]
                self._enqueue(block)

    def is_held(self, block: int) -> bool:
        return self._num_holders[block] > 0

    def published(self) -> dict[int, bytes]:
        """Every cached block and its hash."""
        return dict(self._hash_of)

    def check(self, holders: dict[int, int] | None = None) -> None:
        """Walk everything. `holders` (block -> count), if given, is what the requests say they hold."""
        assert len(self._hash_of) == len(self._block_of)
        for block, hash in self._hash_of.items():
            assert self._block_of[hash] == block, f"{self.name}: block {block} and its hash disagree"
        idle = {block for block in range(1, self.num_blocks) if self._num_holders[block] == 0}
        assert set(self._cached) == idle & set(self._hash_of), f"{self.name}: the queue is not the idle cached blocks"
        assert sorted(self._free) == sorted(idle - set(self._hash_of)), f"{self.name}: the free list is wrong"
        assert self._num_holders[NULL_BLOCK] == 0 and NULL_BLOCK not in self._hash_of
        if holders is not None:
            actual = {b: k for b, k in enumerate(self._num_holders) if k}
            assert actual == holders, f"{self.name}: held {actual}, requests say {holders}"

    def _enqueue(self, block: int) -> None:
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _drop_hash(self, block: int) -> bytes:
        hash = self._hash_of.pop(block)
        del self._block_of[hash]
        return hash
