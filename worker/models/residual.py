"""A residual stream: blocks that each add what they make of its norm, and the norm at its end."""

from collections.abc import Callable
from dataclasses import replace

import torch

from mambalign.kernels.gather_rows import gather_rows
from mambalign.worker.models.layers import ForwardContext, Linear, RMSNorm


class ResidualBlock:
    """x + mixer(norm(x)). A mixer that returns what a linear layer does names that layer `last`."""

    def __init__(self, norm: RMSNorm, mixer: Callable[[torch.Tensor, ForwardContext], torch.Tensor]):
        self.norm, self.mixer = norm, mixer
        if hasattr(mixer, "last"):
            mixer.last.is_summed = True

    def linears(self) -> list[Linear]:
        return self.mixer.linears()


def run_blocks(
    blocks: list[ResidualBlock], final_norm: RMSNorm, x: torch.Tensor, context: ForwardContext
) -> torch.Tensor:
    """Blocks one after the other, then the final norm. Each sum is taken with the norm that follows it.

    With `context.outputs` the first block's mixer returns those tokens only, and the others end there.
    """
    normed, residual = blocks[0].norm(x), x
    next_norms = [*(block.norm for block in blocks[1:]), final_norm]
    for block, norm in zip(blocks, next_norms, strict=True):
        mixed = block.mixer(normed, context)
        if context.outputs is not None:
            residual, context = gather_rows(residual, context.outputs.tokens), replace(context, outputs=None)
        normed, residual = norm.of_sum(mixed, residual)
    return normed
