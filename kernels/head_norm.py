"""RMS norms of the heads of queries and keys, each head by itself, before their positions are put in."""

from typing import NamedTuple

import torch

from mambalign.kernels.rms_norm import rms_norm


class HeadNorms(NamedTuple):
    """Weights [head_dim] fp32 of all heads of queries, and of keys."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def norm_heads(query: torch.Tensor, key: torch.Tensor, norms: HeadNorms) -> None:
    """Norm each head of query [T, heads, head_dim] and key [T, kv_heads, head_dim], in place. On a GPU `place_heads`
    does it.

    Tokens of query and key may lie apart (views).
    """
    for x, weight in ((query, norms.q_weight), (key, norms.k_weight)):
        x.copy_(rms_norm(x.reshape(-1, x.shape[2]), weight, norms.eps).view(x.shape))
