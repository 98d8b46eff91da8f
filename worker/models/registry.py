"""Which model families can be served, and how to load one."""

from pathlib import Path
from typing import Any

import torch

from mambalign.kernels.linear import check_linear_invariance
from mambalign.worker.cpu import keep_freed_memory
from mambalign.worker.models.bamba import Bamba
from mambalign.worker.models.checkpoint_files import TEXT_CONFIGS
from mambalign.worker.models.falcon_h1 import FalconH1
from mambalign.worker.models.granite_hybrid import GraniteHybrid
from mambalign.worker.models.hybrid import HybridConfig, HybridModel
from mambalign.worker.models.lfm2 import Lfm2
from mambalign.worker.models.lfm2_moe import Lfm2Moe
from mambalign.worker.models.loader import (
    CheckpointError,
    DummyWeights,
    Weights,
    fp8_block_of,
    read_config,
)
from mambalign.worker.models.nemotron_h import NemotronH
from mambalign.worker.models.published_config import check_kinds
from mambalign.worker.models.qwen3_5 import Qwen35, Qwen35Moe
from mambalign.worker.models.qwen3_next import Qwen3Next
from mambalign.worker.models.zamba2 import Zamba2

FAMILIES: dict[str, type[HybridModel]] = {  # config.json's model_type -> class
    "bamba": Bamba,
    "falcon_h1": FalconH1,
    "granitemoehybrid": GraniteHybrid,
    "lfm2": Lfm2,
    "lfm2_moe": Lfm2Moe,
    "nemotron_h": NemotronH,
    "qwen3_5": Qwen35,
    "qwen3_5_moe": Qwen35Moe,
    "qwen3_5_moe_text": Qwen35Moe,
    "qwen3_5_text": Qwen35,
    "qwen3_next": Qwen3Next,
    "zamba2": Zamba2,
}


# Multimodal models whose text part is a model of a family, described apart: model_type -> prefix of its weights.
TEXT_PARTS = {
    "NemotronH_Nano_Omni_Reasoning_V3": "language_model.",
    "NemotronH_Nano_VL_V2": "language_model.",
    "NemotronH_Omni_Reasoning_V3": "language_model.",
    "nemotron_h_omni": "language_model.",
}


def family_of(path: str | Path) -> tuple[type[HybridModel], HybridConfig]:
    """The model class of the checkpoint folder, and its parsed config.json; no weight.

    Raises CheckpointError for a family that is not served, or a configuration of it that is not.
    """
    folder = Path(path)
    whole = read_config(folder)
    config, _ = _text_part(whole)
    family = FAMILIES.get(config.get("model_type"))
    if family is None:
        raise CheckpointError(
            f"{folder} is a {config.get('model_type')!r} model; families served: {', '.join(sorted(FAMILIES))}"
        )
    fp8_block_of(whole, folder)
    check_kinds(config.get("text_config") or config)
    parsed = family.Config.from_json(config)
    attention = parsed.attention_specs(torch.float32, with_drafter=False)
    states = parsed.state_specs(torch.float32, torch.float32, with_drafter=False)
    if not attention or not states:
        raise CheckpointError("config.json: all layers with a mixer are of one kind; hybrid models are served")
    return family, parsed


def _text_part(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The configuration of a multimodal model's text part, and the prefix of its weights; else as it came, and ""."""
    prefix = TEXT_PARTS.get(config.get("model_type"), "")
    if not prefix:
        return config, prefix
    found = next((config[name] for name in TEXT_CONFIGS if config.get(name)), None)
    if found is None:
        raise CheckpointError(f"config.json: a {config['model_type']!r} model with none of {', '.join(TEXT_CONFIGS)}")
    return found, prefix


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    show_progress: bool = True,
    load_format: str = "auto",
) -> HybridModel:
    """Load the checkpoint folder `path`, and prove its products batch-invariant on this machine.

    load_format "dummy": random weights of the shapes that config.json asks for. Raises CheckpointError for what
    `family_of` refuses, and for weights that do not fit.
    """
    family, parsed = family_of(path)
    if torch.device(device).type == "cpu":
        keep_freed_memory()
        compile_cpu_kernels(dtype)
    if load_format == "dummy":
        weights = DummyWeights(dtype, device, parsed.tie_word_embeddings)
    else:
        folder = Path(path)
        config = read_config(folder)
        weights = Weights(folder, dtype, device, show_progress, fp8_block_of(config, folder), _text_part(config)[1])
    model = family(parsed, weights)
    weights.finish()
    check_linear_invariance(model.linear_weights(), in_fp32=[model.head_weight])
    return model


def compile_cpu_kernels(dtype: torch.dtype) -> None:
    from mambalign.kernels.cpu import warm_up  # only here: a machine with a GPU need not have numba

    warm_up(dtype)


def weight_bytes(path: str | Path, dtype: torch.dtype) -> int:
    """Bytes of memory that the model's weights take, from config.json alone."""
    family, parsed = family_of(path)
    weights = DummyWeights(dtype, "meta", parsed.tie_word_embeddings)
    family(parsed, weights)
    return weights.num_bytes
