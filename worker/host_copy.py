"""Numbers on their way between host and device, without waiting for either."""

from collections.abc import Sequence

import numpy as np
import torch


def to_device(values: Sequence | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Send host numbers; on a GPU from pinned memory of their own, so that nothing can be overwritten."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class HostCopy:
    """A tensor that is being copied to the host."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self._is_done = tensor, None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._is_done = torch.cuda.Event()
            self._is_done.record()

    def wait(self) -> torch.Tensor:
        """The tensor on the host, when everything before its copy has run."""
        if self._is_done is not None:
            self._is_done.synchronize()
        return self._tensor
