"""Every cached block holds, bit for bit, what its text leaves in memory when it runs alone; and goes on holding it."""

import torch
from lossless.truth import Memory, Truth

from mambalign.engine.block_pool import BlockPool
from mambalign.engine.core import EngineCore
from mambalign.engine.tests.cache_watch import CacheWatch, Text
from mambalign.worker.fused_copy_check import block_checksums


class PublishedMemory:
    """Compares a block when it becomes cached, and its checksum after every step for as long as it is."""

    def __init__(self, core: EngineCore, truth: Truth, pools: list[tuple[BlockPool, list[torch.Tensor]]]):
        self.watch = CacheWatch(core.scheduler, self._on_publish)
        self.num_states = self.num_kv_blocks = 0  # compared
        self._core, self._cache, self._truth = core, core.runner.cache, truth
        self._tensors = {pool.name: tensors for pool, tensors in pools}
        self._pools = [pool for pool, _ in pools]
        self._sealed: dict[str, dict[int, tuple[bytes, list[int]]]] = {pool.name: {} for pool in self._pools}
        self._num_target_layers = len(truth.model.attention_specs(with_drafter=False))

    def _on_publish(self, pool: BlockPool, block: int, text: Text) -> None:
        tokens = text[1]
        memory = self._truth.memory(tokens)
        if pool is self._core.scheduler.blocks.kv_pool:
            self._check_kv(block, len(tokens), memory)
        else:
            self._check_state(block, len(tokens), memory)
        self._sealed[pool.name][block] = (pool.published()[block], self._checksums(pool, [block])[0])

    def _check_kv(self, block: int, end: int, memory: Memory) -> None:
        self.num_kv_blocks += 1
        start = end - self._cache.kv_block_tokens
        caches = (("keys", self._cache.keys, memory.keys), ("values", self._cache.values, memory.values))
        for kind, ours, theirs in caches:
            for layer in range(self._num_target_layers):
                where = f"{kind} of layer {layer}, tokens {start} to {end}, block {block}"
                assert torch.equal(ours[layer][block], theirs[layer][start:end]), f"published {where}"
            for drafter in ours[self._num_target_layers :]:  # its slot 0 has no input
                assert not drafter[block, start == 0 :].isnan().any(), f"a hole in the drafter's {kind}, block {block}"

    def _check_state(self, block: int, num_tokens: int, memory: Memory) -> None:
        self.num_states += 1
        window, is_ds = self._cache.conv_width - 1, self._cache.conv_layout == "DS"
        where = f"after {num_tokens} tokens, block {block}"
        for layer, (conv, theirs) in enumerate(zip(self._cache.conv, memory.conv, strict=True)):
            ours = conv[block, :, :window].T if is_ds else conv[block, :window]
            assert torch.equal(ours, theirs), f"published conv state of layer {layer} {where}"
        for layer, (temporal, theirs) in enumerate(zip(self._cache.temporal, memory.temporal, strict=True)):
            assert torch.equal(temporal[block], theirs), f"published state of layer {layer} {where}"
        if self._cache.carry is not None:
            assert torch.equal(self._cache.carry[block], memory.hidden), f"published carry {where}"

    def _checksums(self, pool: BlockPool, blocks: list[int]) -> list[list[int]]:
        """Of each block, one a tensor."""
        return torch.stack([block_checksums(tensor, blocks) for tensor in self._tensors[pool.name]], dim=1).tolist()

    def check_unchanged(self) -> None:
        """Law 1: until it is evicted a published block never changes."""
        for pool in self._pools:
            sealed, published = self._sealed[pool.name], pool.published()
            for block in [block for block, (hash, _) in sealed.items() if published.get(block) != hash]:
                del sealed[block]
            assert sealed.keys() == published.keys(), f"{pool.name}: published without a word"
            if sealed:
                for block, now in zip(sealed, self._checksums(pool, list(sealed)), strict=True):
                    assert sealed[block][1] == now, f"{pool.name}: published block {block} has changed"
