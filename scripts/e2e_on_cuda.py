"""A pytest plugin: the prefix-cache suites that run in process, on CUDA instead of a CPU.

    PYTHONPATH=scripts python -m pytest -p e2e_on_cuda e2e/test_prefix_cache_suite.py e2e/test_interleavings.py

Engines and their weights move to the device, in fp32. What each request must get is then said by an engine on the
same device that runs it alone: V1, eager, no drafts, no cache. Transformers goes on judging its tokens. Where there is
no openai client, no server can be asked, and the suites that need none still run. Without CUDA it changes nothing
but who says what a request must get.
"""

import functools
import importlib.util
import sys
import time
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))
if importlib.util.find_spec("openai") is None:
    sys.modules["http_client"] = types.ModuleType("http_client")
    sys.modules["http_client"].open_server = None

import cells
import msgspec
import oracle

from mambalign.engine import LLM
from mambalign.engine.local_client import LocalClient
from mambalign.engine.messages import EngineRequest
from mambalign.engine.reference import Generation
from mambalign.worker.models.registry import load_model
from mambalign.worker.sampling_params import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONGEST = 2048  # tokens of a text


class EngineAlone:
    """In the place of `ReferenceEngine`: each request alone in an engine that has every feature off."""

    def __init__(self) -> None:
        self.core = LLM(
            dtype="float32",
            device=DEVICE,
            runner="v1",
            spec_tokens=0,
            mamba_cache_mode="none",
            enforce_eager=True,
            max_num_seqs=1,
            max_num_batched_tokens=LONGEST,
            max_model_len=LONGEST,
            cache_memory="256MiB",
        ).core

    def generate(self, prompt_token_ids: list[int], params: SamplingParams, choice: int = 0) -> Generation:
        """As `ReferenceEngine.generate` does."""
        single = msgspec.structs.replace(params, n=1, seed=params.seed or 0)
        request = EngineRequest("alone", list(prompt_token_ids), single, choice, time.time())
        token_ids, logprobs, reason = [], [], ""
        for output in LocalClient(self.core).generate([request]):
            token_ids += output.new_token_ids
            logprobs += output.new_logprobs or [None] * len(output.new_token_ids)
            reason = output.finish_reason or reason
        return Generation(token_ids, logprobs, reason)


options_on_cpu = cells.Cell.options


def options_on_device(cell: cells.Cell, pools: cells.Pools) -> dict:
    return options_on_cpu(cell, pools) | {"device": DEVICE}


@functools.cache
def model_on_device():
    return load_model(cells.default_path(), torch.float32, DEVICE, show_progress=False)


cells.Cell.options = options_on_device
cells.default_model = model_on_device
reference = functools.cached_property(lambda self: EngineAlone())
reference.__set_name__(oracle.Oracle, "reference")
oracle.Oracle.reference = reference


def pytest_report_header() -> str:
    return f"in-process suites on {torch.cuda.get_device_name() if DEVICE == 'cuda' else DEVICE}, fp32"
