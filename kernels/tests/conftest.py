"""Kernels under test run compiled on a GPU, else through Triton's interpreter.

Triton reads its switch when it is imported and when a kernel is defined, so the kernels are imported here, before any
test module is; tests in other folders of the same run go on with the torch references.
"""

import importlib
import os
import sys

import pytest
import torch

INTERPRET = "TRITON_INTERPRET"
KERNEL_MODULES = (
    "activation",
    "attention_tile",
    "attention_triton",
    "batch_memcpy",
    "combine_experts",
    "draft_addresses",
    "draft_head",
    "draw_tokens",
    "expert_routing",
    "gate_mul",
    "gather_rows",
    "grouped_linear",
    "linear_triton",
    "mamba_state_copy",
    "mamba_state_table",
    "move_bytes",
    "padded_rows",
    "place_heads",
    "postprocess_mamba",
    "precopy_mamba_align",
    "preprocess_mamba_align",
    "rms_norm",
    "rotary",
    "sampling",
    "scatter_rows",
    "sigmoid_mul",
    "slot_rows",
    "step_addresses",
    "verify_drafts",
)

IMPORTED_TOO_EARLY = "triton" in sys.modules and os.environ.get(INTERPRET) != "1"

if not torch.cuda.is_available() and os.environ.get(INTERPRET) != "1" and not IMPORTED_TOO_EARLY:
    os.environ[INTERPRET] = "1"
    for module in KERNEL_MODULES:
        importlib.import_module(f"mambalign.kernels.{module}")
    del os.environ[INTERPRET]
    sys.modules["mambalign.kernels.launch"].INTERPRETED = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Device whose tensors the kernels run on, compiled or interpreted."""
    if torch.cuda.is_available():
        return "cuda"
    if IMPORTED_TOO_EARLY:
        pytest.fail(f"triton was imported without its interpreter: run kernels/tests first, or set {INTERPRET}=1")
    monkeypatch.setenv(INTERPRET, "1")
    monkeypatch.setattr("mambalign.kernels.launch.INTERPRETED", True)
    return "cpu"
