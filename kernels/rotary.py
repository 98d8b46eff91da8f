"""Rotary positions (arXiv 2104.09864), in place on queries and keys.

Formula, on the first 2 * half channels of each head, the others stay: for j < half and the angle of position p,

    x_j, x_{half+j} = x_j * cos_pj - x_{half+j} * sin_pj,  x_{half+j} * cos_pj + x_j * sin_pj      in fp32, rounded once

Cosines and sines come from a table with a line a position, so that a token's bits follow from its position alone,
wherever in a batch it lies: torch's own cos need not give an element the same bits at every place.
"""

import torch

LINES_TOGETHER = 4096  # of a table as it is filled: its angles need no second table's memory


def rotary_table(inv_freq: torch.Tensor, scale: float, num_positions: int) -> torch.Tensor:
    """[num_positions, 2, half] fp32: cosines, then sines, of position * inv_freq [half] (fp32), times scale."""
    table = torch.empty(num_positions, 2, len(inv_freq), dtype=torch.float32, device=inv_freq.device)
    for start in range(0, num_positions, LINES_TOGETHER):
        lines = table[start : start + LINES_TOGETHER]
        positions = torch.arange(start, start + len(lines), dtype=torch.float32, device=inv_freq.device)
        angles = positions[:, None] * inv_freq
        lines[:, 0], lines[:, 1] = angles.cos() * scale, angles.sin() * scale
    return table


def rotary_embed(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """Rotate query [T, heads, head_dim] and key [T, kv_heads, head_dim] in place to positions int64 [T].

    By torch operations whose bits do not depend on an element's place; on a GPU `place_heads` does it. table: of
    `rotary_table`, with half <= head_dim / 2; a position outside it takes the nearest line. Tokens of query and key
    may lie apart (views).
    """
    half = table.shape[2]
    cos, sin = table[positions.clamp(0, len(table) - 1)].unsqueeze(2).unbind(1)  # [T, 1, half]
    for x in (query, key):
        low, high = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = low * cos - high * sin, high * cos + low * sin
        x[..., :half], x[..., half : 2 * half] = turned
