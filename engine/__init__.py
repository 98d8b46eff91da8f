"""The engine: requests, scheduling, caches, API. `from mambalign.engine import LLM, SamplingParams`.

Names are imported when they are first used, so that `serve --help` needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mambalign.engine.llm import LLM, CompletionOutput, RequestOutput
    from mambalign.engine.option import ConfigError
    from mambalign.worker.sampling_params import SamplingParams, StructuredOutputs

__all__ = ["LLM", "CompletionOutput", "ConfigError", "RequestOutput", "SamplingParams", "StructuredOutputs"]

_HOMES = {
    "LLM": "mambalign.engine.llm",
    "CompletionOutput": "mambalign.engine.llm",
    "RequestOutput": "mambalign.engine.llm",
    "ConfigError": "mambalign.engine.option",
    "SamplingParams": "mambalign.worker.sampling_params",
    "StructuredOutputs": "mambalign.worker.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
