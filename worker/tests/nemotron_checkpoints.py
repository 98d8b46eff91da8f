"""Small random Nemotron-H checkpoints, written by transformers, with an MTP head beside the target."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig, NemotronHForCausalLM

import mambalign.engine

DEFAULT_MODEL = Path(mambalign.engine.__file__).parent / "default_model"
HEAD_FOLDER = "head"  # in the checkpoint's: the head's layers, as a model that transformers can run

# Odd sizes on purpose: groups that are no power of two, head dims that fill no vector, a vocabulary that fills no tile.
DENSE = {
    "odd": dict(
        pattern="M-*M", hidden_size=48, intermediate_size=601, num_attention_heads=6, num_key_value_heads=2,
        head_dim=10, ssm_state_size=12, mamba_num_heads=6, n_groups=3, mamba_head_dim=10, conv_kernel=4, vocab_size=97,
    ),
    "tied": dict(
        pattern="*MM-", hidden_size=72, intermediate_size=40, num_attention_heads=3, num_key_value_heads=1, head_dim=33,
        ssm_state_size=7, mamba_num_heads=5, n_groups=1, mamba_head_dim=9, conv_kernel=2, vocab_size=130,
        tie_word_embeddings=True, use_bias=True, mlp_bias=True, mlp_hidden_act="silu", use_conv_bias=False,
    ),
    "wide": dict(
        pattern="MM*", hidden_size=64, intermediate_size=8, num_attention_heads=8, num_key_value_heads=8, head_dim=96,
        ssm_state_size=16, mamba_num_heads=12, n_groups=4, mamba_head_dim=70, conv_kernel=3, vocab_size=64,
    ),
}  # fmt: skip
EXPERTS = {
    "experts": dict(
        pattern="ME*EM", head_pattern="*E", hidden_size=48, intermediate_size=60, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, ssm_state_size=12, mamba_num_heads=6, n_groups=3, mamba_head_dim=10,
        conv_kernel=4, vocab_size=97, n_routed_experts=7, num_experts_per_tok=3, moe_intermediate_size=33,
        moe_shared_expert_intermediate_size=21, routed_scaling_factor=2.5,
    ),
    "latent": dict(
        pattern="EM-*E", head_pattern="E*-", hidden_size=72, intermediate_size=40, num_attention_heads=3,
        num_key_value_heads=1, head_dim=33, ssm_state_size=7, mamba_num_heads=5, n_groups=1, mamba_head_dim=9,
        conv_kernel=4, vocab_size=130, n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=50, moe_latent_size=20, n_group=4, topk_group=2, norm_topk_prob=False,
        mlp_bias=True, routed_scaling_factor=1.5,
    ),
}  # fmt: skip
SMALL = DENSE | EXPERTS


def write_checkpoint(folder: Path, pattern: str, head_pattern: str = "*-", **sizes) -> Path:
    """Write the target and its head into `folder`. The head's weights are named as published: mtp.layers.*."""
    torch.manual_seed(len(pattern) + sizes["hidden_size"])
    config = NemotronHConfig(
        hybrid_override_pattern=pattern, num_nextn_predict_layers=1, mtp_hybrid_override_pattern=head_pattern,
        initializer_range=0.2, time_step_min=1e-6, **sizes,
    )  # fmt: skip
    _random_model(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    head_config = NemotronHConfig(hybrid_override_pattern=head_pattern, initializer_range=0.2, **sizes)
    _random_model(head_config).save_pretrained(folder / HEAD_FOLDER)
    hidden, last = config.hidden_size, len(head_pattern) - 1
    for name, tensor in load_file(folder / HEAD_FOLDER / "model.safetensors").items():
        if name.startswith("backbone.layers."):
            weights["mtp." + name.removeprefix("backbone.")] = tensor
        elif name == "backbone.norm_f.weight":
            weights[f"mtp.layers.{last}.final_layernorm.weight"] = tensor
    for name, shape in {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}.items():
        weights[f"mtp.layers.0.{name}.weight"] = torch.randn(shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in DEFAULT_MODEL.glob("tokenizer*.json"):  # a larger vocabulary than the model's
        shutil.copy(file, folder)
    return folder


def _random_model(config: NemotronHConfig) -> NemotronHForCausalLM:
    model = NemotronHForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith((".D", "norm.weight", "norm_f.weight", "dt_bias", "conv1d.bias")):
            torch.nn.init.normal_(parameter, 1.0, 0.5)
        elif name.endswith(".bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.5)
    return model


def load_oracle(folder: Path) -> NemotronHForCausalLM:
    """transformers' model. Tied weights are tied by us: transformers' class does not do it.

    Its experts run one by one: the grouped product that it takes by default refuses odd sizes.
    """
    loaded = NemotronHForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    if loaded.config.tie_word_embeddings:
        loaded.lm_head.weight = loaded.model.embeddings.weight
    return loaded.eval()


class HeadOracle:
    """The published head in plain torch, over transformers' layers: one pass over a whole text."""

    def __init__(self, folder: Path, eps: float = 1e-5):
        self.eps = eps
        self.layers = load_oracle(folder / HEAD_FOLDER).model
        weights = load_file(folder / "model.safetensors")
        names = ("enorm", "hnorm", "eh_proj")
        self.enorm, self.hnorm, self.eh_proj = (weights[f"mtp.layers.0.{name}.weight"] for name in names)

    def __call__(self, embedding: torch.Tensor, prev_hidden: torch.Tensor) -> torch.Tensor:
        """Both [T, hidden], of tokens 1 .. T and of the hidden states before them. Returns [T, hidden]."""
        both = [self._norm(embedding, self.enorm), self._norm(prev_hidden, self.hnorm)]
        x = torch.nn.functional.linear(torch.cat(both, dim=1), self.eh_proj)
        return self.layers(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[1],), weight, self.eps)
