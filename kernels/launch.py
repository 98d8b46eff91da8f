"""Whether a launch runs the Triton kernel or its torch reference, and on how many programs."""

import os
from functools import cache

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED_PROGRAMS = 4
PROGRAMS_PER_MULTIPROCESSOR = 6


def runs_kernel(tensor: torch.Tensor) -> bool:
    """True on a GPU, and on a CPU under Triton's interpreter; False where the torch reference serves."""
    return tensor.is_cuda or INTERPRETED


@cache
def persistent_programs(device: torch.device) -> int:
    """Programs of a persistent launch: a fixed number, so that a captured launch never changes."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_MULTIPROCESSOR
