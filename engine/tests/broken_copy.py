"""A fault planted into the fused pre-copy: one bit of what it wrote is wrong.

As a program it is the real server with that fault, once: `python broken_copy.py [options]`.
"""

import sys
from collections.abc import Callable

import torch

from mambalign.engine.config import EngineConfig
from mambalign.engine.core import EngineCore
from mambalign.worker import mamba_gpu_context
from mambalign.worker.state_cache import StateCache

CORE = "broken_copy:BrokenCopyCore"
FusedCopy = Callable[..., None]


class BrokenCopy:
    """The fused copy, then a flipped bit in a temporal state of the first `max_faults` rows that move by `min_bias`."""

    def __init__(self, fused_copy: FusedCopy, cache: StateCache, min_bias: int = 1, max_faults: int = 1):
        self.fused_copy = fused_copy
        self.cache = cache
        self.min_bias = min_bias
        self.max_faults = max_faults
        self.blocks: list[int] = []  # state blocks that were spoiled

    def __call__(
        self,
        source_column: torch.Tensor,
        dest_column: torch.Tensor,
        token_bias: torch.Tensor,
        block_table: torch.Tensor,
        idx_mapping: torch.Tensor | None,
        work_list: torch.Tensor,
        work_count: torch.Tensor,
        *rest: object,
    ) -> None:
        tables = (source_column, dest_column, token_bias, block_table, idx_mapping)
        self.fused_copy(*tables, work_list, work_count, *rest)
        for row in work_list[: int(work_count)].tolist():
            slot = row if idx_mapping is None else int(idx_mapping[row])
            if len(self.blocks) < self.max_faults and int(token_bias[slot]) >= self.min_bias:
                block = int(block_table[slot, 0, int(dest_column[slot])])
                self.cache.temporal[0][block].view(-1).view(torch.uint8)[0] ^= 1
                self.blocks.append(block)


class BrokenCopyCore(EngineCore):
    """The engine, with the fault in its process."""

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None):
        super().__init__(config, progress)
        fused_copy = mamba_gpu_context.precopy_mamba_align_fused
        mamba_gpu_context.precopy_mamba_align_fused = BrokenCopy(fused_copy, self.runner.cache, min_bias=0)


if __name__ == "__main__":
    from mambalign.engine.cli import make_parser, parse
    from mambalign.engine.server.run import run_server

    sys.exit(run_server(*parse(make_parser("serve"), sys.argv[1:]), core=CORE))
