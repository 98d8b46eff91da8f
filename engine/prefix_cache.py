"""The prefix cache: one tree of token prefixes over two pools, KV blocks and recurrent states.

A prefix of k KV blocks is named by a 128-bit hash chained over its blocks (and the request's salt). A KV block is
cached under the hash of the prefix that it ends; a state under the hash of the prefix that it is the state of.
Cached KV prefixes are closed: when one is cached, so is every shorter one. Evicting a KV block therefore drops all
that lies behind it, states included.

A token that was sampled proves that the memory of the text before it holds numbers. What a piece of a prompt leaves is
untested until the prompt's end is sampled: should that fail, it is dropped.
"""

import hashlib
import struct
from collections import OrderedDict
from dataclasses import dataclass

from mambalign.engine.block_pool import BlockPool
from mambalign.engine.request import Request

# A chat prompt ends in a header that the next turn does not contain: a boundary this close to the end of a prompt
# may lie inside it, so the boundary before is kept as well.
HEADER_TOKENS = 16


# Why a request found nothing: no block is as short as its text; the text was never here; its KV is here and no state
# at a boundary was kept; it was here and its memory was needed, or a request failed on it; it was not looked up.
MISS_CAUSES = ("too_short", "unseen", "no_state", "evicted", "disabled")
MAX_EVICTED_HASHES = 1 << 15  # remembered, to tell what was evicted from what was never here


@dataclass(frozen=True)
class Hit:
    """What the cache has for a text: everything up to `num_tokens` is there, KV and state.

    `num_matched_tokens` counts the KV chain alone; it is larger when states are missing further on.
    """

    num_tokens: int
    num_matched_tokens: int


class PrefixCache:
    """Looks up, publishes and evicts. Holds no reference to a block: the scheduler does."""

    def __init__(
        self,
        kv_pool: BlockPool,
        mamba_pool: BlockPool,
        kv_block_tokens: int,
        mamba_block_tokens: int,
        prompts_only: bool = False,
    ):
        """prompts_only: generated tokens are computed in another way than a prompt's, and are never cached as such."""
        assert mamba_block_tokens % kv_block_tokens == 0
        self.kv_pool = kv_pool
        self.mamba_pool = mamba_pool
        self.kv_block_tokens = kv_block_tokens
        self.mamba_block_tokens = mamba_block_tokens
        self.prompts_only = prompts_only
        self._children: dict[bytes, set[bytes]] = {}  # cached KV prefix -> its cached extensions by one block
        self._parent: dict[bytes, bytes] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # hashes whose KV or state was evicted, oldest first
        self._untested: set[bytes] = set()  # of cached KV prefixes: no token was sampled that depends on KV or state
        kv_pool.on_evict = self._drop_kv_subtree
        mamba_pool.on_evict = self._note_evicted

    def extend_hashes(self, request: Request) -> None:
        """Hash the full KV blocks of the request's known tokens that are not hashed yet."""
        size, hashes, tokens = self.kv_block_tokens, request.block_hashes, request.token_ids
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            previous = hashes[-1] if hashes else hashlib.blake2b(request.cache_salt.encode(), digest_size=16).digest()
            block = struct.pack(f"<{size}q", *tokens[start : start + size])
            hashes.append(hashlib.blake2b(previous + block, digest_size=16).digest())

    def num_cacheable(self, request: Request) -> int:
        """Known tokens of the request that the cache may hold, or serve."""
        return request.num_prompt_tokens if self.prompts_only else request.num_tokens

    def state_hash(self, request: Request, boundary: int) -> bytes:
        """Name of the prefix of `boundary` tokens, a positive multiple of the mamba block size."""
        return request.block_hashes[boundary // self.kv_block_tokens - 1]

    def lookup(self, request: Request) -> Hit:
        """Longest prefix with both KV and state, at least one token short of the known text; changes nothing."""
        self.extend_hashes(request)
        num_matched_blocks = 0
        for hash in request.block_hashes[: self.num_cacheable(request) // self.kv_block_tokens]:
            if self.kv_pool.lookup(hash) is None:
                break
            num_matched_blocks += 1
        num_matched = num_matched_blocks * self.kv_block_tokens
        step = self.mamba_block_tokens
        boundary = min(num_matched, request.num_tokens - 1) // step * step
        while boundary and self.mamba_pool.lookup(self.state_hash(request, boundary)) is None:
            boundary -= step
        return Hit(boundary, num_matched)

    def miss_cause(self, request: Request, hit: Hit) -> str:
        """One of `MISS_CAUSES`, for a lookup that found nothing."""
        size, step = self.kv_block_tokens, self.mamba_block_tokens
        if request.num_tokens <= step:
            return "too_short"
        boundary = min(hit.num_matched_tokens, request.num_tokens - 1) // step * step
        if boundary:
            names = [self.state_hash(request, m) for m in range(step, boundary + 1, step)]
            return "evicted" if any(name in self._evicted for name in names) else "no_state"
        next_block = request.block_hashes[hit.num_matched_tokens // size]
        return "evicted" if next_block in self._evicted else "unseen"

    def boundaries_to_keep(self, request: Request, hit: Hit) -> list[int]:
        """Boundaries behind the hit whose states a prefill keeps: the prompt's last, and the junction.

        The junction is where the KV chain stops matching: texts that share this prefix part after it, so the next
        one hits there. A state that is cached already is kept too: it may be gone before this one is computed.
        """
        step, num_tokens = self.mamba_block_tokens, self.num_cacheable(request)
        last = num_tokens // step * step
        wanted = {last, hit.num_matched_tokens // step * step}
        if num_tokens - last < HEADER_TOKENS:
            wanted.add(last - step)
        return sorted(m for m in wanted if m > hit.num_tokens)

    def touch_matched(self, request: Request, hit: Hit) -> None:
        """Refresh the KV blocks that matched beyond the hit: they are computed again, but their copies are in use."""
        first, last = hit.num_tokens // self.kv_block_tokens, hit.num_matched_tokens // self.kv_block_tokens
        for hash in reversed(request.block_hashes[first:last]):
            self.kv_pool.touch(self.kv_pool.lookup(hash))

    def publish_kv(self, request: Request, num_tokens: int, is_tested: bool = True) -> None:
        """Cache the request's KV blocks that lie within its first `num_tokens` tokens and are not cached yet."""
        self.extend_hashes(request)
        hashes, last = request.block_hashes, num_tokens // self.kv_block_tokens
        first = last
        while first and self.kv_pool.lookup(hashes[first - 1]) is None:
            first -= 1
        for i in range(first, last):
            is_new = self.kv_pool.publish(request.kv_blocks[i], hashes[i])
            assert is_new, "a cached KV block behind one that is not"
            if i:
                self._children.setdefault(hashes[i - 1], set()).add(hashes[i])
                self._parent[hashes[i]] = hashes[i - 1]
        if not is_tested:
            self._untested.update(hashes[first:last])

    def publish_state(self, request: Request, boundary: int, block: int, is_tested: bool = True) -> bytes | None:
        """Cache the state after `boundary` tokens; None when it is cached already: that one is refreshed.

        The KV of the prefix must be cached (`publish_kv` first): without it nothing could reach the state.
        """
        hash = self.state_hash(request, boundary)
        assert self.kv_pool.lookup(hash) is not None, "state published before its KV"
        if self.mamba_pool.publish(block, hash):
            self._evicted.pop(hash, None)
            if not is_tested:
                self._untested.add(hash)
            return hash
        self.mamba_pool.touch(self.mamba_pool.lookup(hash))
        return None

    def mark_tested(self, request: Request) -> None:
        """A token was sampled behind all that the request has run, its cached prefix included."""
        self._untested.difference_update(request.block_hashes)

    def forget_untested(self, request: Request) -> None:
        """The request failed: drop what it has left, or found, that nothing proves to be right."""
        for hash in request.block_hashes:
            if hash in self._untested:
                self._drop_kv_subtree(hash)
                return

    def supersede_state(self, hash: bytes) -> None:
        """The state is of little use any more: evict it before all others."""
        block = self.mamba_pool.lookup(hash)
        if block is not None:
            self.mamba_pool.demote(block)

    def reset(self) -> None:
        """Forget every prefix. Blocks that running requests hold stay theirs."""
        for pool in (self.kv_pool, self.mamba_pool):
            for hash in list(pool.published().values()):
                pool.forget(hash)
        self._children.clear()
        self._parent.clear()
        self._evicted.clear()
        self._untested.clear()

    def _note_evicted(self, hash: bytes) -> None:
        self._evicted[hash] = None
        self._evicted.move_to_end(hash)
        if len(self._evicted) > MAX_EVICTED_HASHES:
            self._evicted.popitem(last=False)

    def _drop_kv_subtree(self, hash: bytes) -> None:
        """The KV block of `hash` was evicted, or is to go: nothing behind it can be reached."""
        parent = self._parent.pop(hash, None)
        if parent is not None:
            self._children[parent].discard(hash)
            if not self._children[parent]:
                del self._children[parent]
        stack = [hash]
        while stack:
            dropped = stack.pop()
            self._note_evicted(dropped)
            self._untested.discard(dropped)
            self.kv_pool.forget(dropped)
            self.mamba_pool.forget(dropped)
            for child in self._children.pop(dropped, ()):
                self._parent.pop(child)
                stack.append(child)

    def check(self) -> None:
        """Cached KV prefixes are closed, and every cached state has its KV."""
        kv_hashes = set(self.kv_pool.published().values())
        for hash in self.mamba_pool.published().values():
            assert hash in kv_hashes, "a cached state whose KV is gone"
        for child, parent in self._parent.items():
            assert child in kv_hashes and parent in kv_hashes, "a cached KV block whose prefix is gone"
            assert child in self._children[parent]
        assert sum(map(len, self._children.values())) == len(self._parent)
        assert self._untested <= kv_hashes, "a prefix to be tested that is gone"
