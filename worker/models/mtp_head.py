"""The multi-token prediction head of published checkpoints: two norms, a projection, and blocks like the model's."""

from dataclasses import dataclass

import torch

from mambalign.worker.models.layers import ForwardContext, Linear, RMSNorm
from mambalign.worker.models.residual import ResidualBlock, run_blocks


@dataclass(frozen=True)
class MtpHead:
    """From the hidden state of position p-1 and token p, the hidden state that predicts p+1.

    The state that comes in is the one after a final norm, the target's or this head's own, so the head can be
    chained on its output.
    """

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    fc: Linear  # [2 * hidden] -> [hidden]
    blocks: list[ResidualBlock]
    final_norm: RMSNorm

    def __call__(self, embedding: torch.Tensor, prev_hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        width = embedding.shape[1]
        normed = embedding.new_empty(len(embedding), 2 * width)
        self.embedding_norm(embedding, normed[:, :width])
        self.hidden_norm(prev_hidden, normed[:, width:])
        return run_blocks(self.blocks, self.final_norm, self.fc(normed), context)

    def linears(self) -> list[Linear]:
        return [self.fc, *(each for block in self.blocks for each in block.linears())]
