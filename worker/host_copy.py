"""Numbers on their way between host and device, without waiting for either."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

PART_BYTES = 16  # parts of one transfer begin at a multiple: a kernel is compiled for how its pointers are aligned
DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def to_device(values: Sequence | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Send host numbers; on a GPU from pinned memory of their own, so that nothing can be overwritten."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def send_together(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Send int32 and int64 arrays in one transfer; each arrives with its name, dtype and shape."""
    if device.type != "cuda":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    packed = torch.empty(sum(map(_room, arrays.values())), dtype=torch.uint8, pin_memory=True)
    pack(arrays, packed)
    return unpack(arrays, packed.to(device, non_blocking=True))


def pack(arrays: Mapping[str, np.ndarray], packed: torch.Tensor) -> None:
    """Copy the arrays' bytes into packed uint8 [bytes], one after the other."""
    for part, array in zip(unpack(arrays, packed).values(), arrays.values(), strict=True):
        part.numpy()[...] = array


def unpack(arrays: Mapping[str, np.ndarray], packed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of packed bytes, one for each array, of its dtype and shape."""
    parts, start = {}, 0
    for name, array in arrays.items():
        parts[name] = packed[start : start + array.nbytes].view(DTYPES[array.dtype]).view(array.shape)
        start += _room(array)
    return parts


def _room(array: np.ndarray) -> int:
    return -(-array.nbytes // PART_BYTES) * PART_BYTES


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
