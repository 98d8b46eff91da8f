"""Numbers that the host writes anew for a step and kernels read: one buffer on both sides."""

import numpy as np
import torch


class CpuGpuBuffer:
    """An array that the host fills (`np`, over pinned memory `cpu`) and the device reads (`gpu`).

    On a CPU all three are one memory. A copy is asynchronous: do not refill before the step's results are read.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device | str, fill: int = 0):
        self.device = torch.device(device)
        self.cpu = torch.full(shape, fill, dtype=dtype, pin_memory=self.device.type == "cuda")
        self.gpu = self.cpu.to(self.device)
        self.np: np.ndarray = self.cpu.numpy()

    def part(self, start: int, length: int) -> "CpuGpuBuffer":
        """Entries `start .. start+length-1` as a buffer of its own, over the same memory."""
        part = object.__new__(CpuGpuBuffer)
        part.device = self.device
        part.cpu, part.gpu = self.cpu[start : start + length], self.gpu[start : start + length]
        part.np = part.cpu.numpy()
        return part

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Send the first `n` entries (all without `n`); returns their device tensor."""
        gpu = self.gpu[:n]
        if self.gpu.data_ptr() != self.cpu.data_ptr():
            gpu.copy_(self.cpu[:n], non_blocking=True)
        return gpu
