"""How far a result may lie from its oracle: (absolute, relative) by dtype. The one table that all tests use.

Paths of our own are compared with `torch.equal`: they have no tolerance.
"""

import torch

TOLERANCES: dict[str, dict[torch.dtype, tuple[float, float]]] = {
    # one kernel against a plain fp64 form of its formula, values of order 1
    "kernel": {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2e-2, 2e-2)},
    # logits against transformers, over their largest magnitude
    "logits": {torch.float32: (1e-5, 0.0), torch.bfloat16: (5e-2, 0.0)},
}


def tolerance(kind: str, dtype: torch.dtype) -> dict[str, float]:
    """Keyword arguments for `torch.testing.assert_close`."""
    absolute, relative = TOLERANCES[kind][dtype]
    return {"atol": absolute, "rtol": relative}
