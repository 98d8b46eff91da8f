"""Programmatic dependent launch: the next kernel gets ready while this one still runs (CUDA's name; sm_90 and newer).

A kernel that takes part begins by `wait_for_inputs`: it lets the next launch come in as soon as all programs of its own
have begun, and then waits until the launch before has ended and its writes can be seen. Since every such kernel waits
before it touches memory, the order of a stream holds. What is hidden is the time of launches, and of the last programs
of the kernel before. A kernel that fills the machine lets the next one in only as its programs end: programs that come
in while it runs crowd where there is room, and a product whose programs are two on some multiprocessors and none on
others takes a third longer.
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

USE_PDL = os.environ.get("MAMBALIGN_PDL", "1") == "1"  # its ablation: a kernel comes in when the one before has ended


@cache
def pdl(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that begins by `wait_for_inputs`, and the value of its PDL."""
    if device.type != "cuda" or not USE_PDL or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """The first statement of a kernel: no memory may be touched before it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
