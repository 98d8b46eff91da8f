"""The shape of the network that `train_default_model.py` trains, and its weights before the first step.

Parameters live in one dict under their published names (`backbone.*`, `lm_head.weight`, `mtp.layers.*`),
so that what is trained is what is saved.
"""

import math
from typing import Any

import torch

Params = dict[str, torch.Tensor]

CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 11,
    "hybrid_override_pattern": "M-M*-M-M*M-",
    "num_attention_heads": 4,
    "head_dim": 64,
    "attention_head_dim": 64,
    "num_key_value_heads": 2,
    "mlp_hidden_act": "relu2",
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "residual_in_fp32": False,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": None,
    "max_position_embeddings": 4096,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "ssm_state_size": 64,
    "mamba_num_heads": 8,
    "n_groups": 2,
    "mamba_head_dim": 64,
    "conv_kernel": 4,
    "expand": 2,
    "mamba_hidden_act": "silu",
    "time_step_min": 1e-06,
    "time_step_max": 0.1,
    "time_step_floor": 0.0001,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "chunk_size": 128,
    "rescale_prenorm_residual": True,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*-",
}

MIXER_WEIGHTS = {
    "M": (
        "in_proj.weight",
        "conv1d.weight",
        "conv1d.bias",
        "dt_bias",
        "A_log",
        "D",
        "norm.weight",
        "out_proj.weight",
    ),
    "*": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"),
    "-": ("up_proj.weight", "down_proj.weight"),
}


def parameter_shapes(config: dict[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of the checkpoint, under its published name."""
    dim, vocab = config["hidden_size"], config["vocab_size"]
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    conv_dim = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    heads = (config["mamba_num_heads"],)
    q_dim = config["num_attention_heads"] * config["head_dim"]
    kv_dim = config["num_key_value_heads"] * config["head_dim"]
    mixers = {
        "M": (
            (inner + conv_dim + heads[0], dim),
            (conv_dim, 1, config["conv_kernel"]),
            (conv_dim,),
            heads,
            heads,
            heads,
            (inner,),
            (dim, inner),
        ),
        "*": ((q_dim, dim), (kv_dim, dim), (kv_dim, dim), (dim, q_dim)),
        "-": ((config["intermediate_size"], dim), (dim, config["intermediate_size"])),
    }
    shapes: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (vocab, dim)}
    for prefix, pattern in (
        ("backbone.layers", config["hybrid_override_pattern"]),
        ("mtp.layers", config["mtp_hybrid_override_pattern"]),
    ):
        for index, kind in enumerate(pattern):
            shapes[f"{prefix}.{index}.norm.weight"] = (dim,)
            for name, shape in zip(MIXER_WEIGHTS[kind], mixers[kind], strict=True):
                shapes[f"{prefix}.{index}.mixer.{name}"] = shape
    shapes["backbone.norm_f.weight"] = (dim,)
    shapes["lm_head.weight"] = (vocab, dim)
    shapes["mtp.layers.0.eh_proj.weight"] = (dim, 2 * dim)
    shapes["mtp.layers.0.enorm.weight"] = (dim,)
    shapes["mtp.layers.0.hnorm.weight"] = (dim,)
    shapes["mtp.layers.1.final_layernorm.weight"] = (dim,)
    return shapes


def init_parameters(config: dict[str, Any], seed: int, device: str) -> Params:
    """Fresh fp32 weights. Projections back into the residual stream and the head start small or at zero."""
    gen = torch.Generator().manual_seed(seed)
    params: Params = {}
    for name, shape in sorted(parameter_shapes(config).items()):
        leaf = name.split("mixer.")[-1]
        if leaf == "A_log":
            value = torch.empty(shape).uniform_(1, 16, generator=gen).log()
        elif leaf == "dt_bias":
            low, high = math.log(1e-3), math.log(1e-1)
            step = torch.exp(low + (high - low) * torch.rand(shape, generator=gen))
            value = step + torch.log(-torch.expm1(-step))
        elif leaf == "conv1d.bias" or leaf in ("out_proj.weight", "o_proj.weight", "down_proj.weight"):
            value = torch.zeros(shape)
        elif leaf == "conv1d.weight":
            value = torch.empty(shape).uniform_(-0.5, 0.5, generator=gen)
        elif leaf == "D" or len(shape) == 1:
            value = torch.ones(shape)
        elif name == "backbone.embeddings.weight":
            value = torch.randn(shape, generator=gen)
        elif name == "lm_head.weight":
            value = torch.randn(shape, generator=gen) * 1e-3
        else:
            value = torch.randn(shape, generator=gen) * 0.7 / math.sqrt(shape[1])
        params[name] = value.to(device).requires_grad_(True)
    return params
