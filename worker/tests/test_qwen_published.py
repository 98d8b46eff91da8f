"""Published Qwen checkpoints: their config.json says as many parameters as their files hold."""

import pytest

from mambalign.worker.models.registry import FAMILIES
from mambalign.worker.tests.served import count_parameters

ROTARY = dict(rope_theta=10000000, partial_rotary_factor=0.25)
MROPE = ROTARY | dict(rope_type="default", mrope_section=[11, 11, 10], mrope_interleaved=True)
COMMON = dict(
    hidden_act="silu", attention_bias=False, head_dim=256, full_attention_interval=4, linear_conv_kernel_dim=4,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, rms_norm_eps=1e-6,
    max_position_embeddings=262144,
)  # fmt: skip
TEXT = COMMON | dict(
    vocab_size=248320, attn_output_gate=True, mamba_ssm_dtype="float32", mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False, rope_parameters=MROPE, eos_token_id=248044,
)  # fmt: skip


def multimodal(model_type: str, **text) -> dict:
    return {"model_type": model_type, "text_config": TEXT | {"model_type": f"{model_type}_text"} | text}


CONFIGS = {
    "Qwen3-Next-80B-A3B": COMMON
    | ROTARY
    | dict(
        model_type="qwen3_next", vocab_size=151936, hidden_size=2048, intermediate_size=5120, num_hidden_layers=48,
        num_attention_heads=16, num_key_value_heads=2, linear_num_value_heads=32, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], rope_scaling=None, use_sliding_window=False, eos_token_id=151645,
    ),
    "Qwen3.5-9B": multimodal(
        "qwen3_5", hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, linear_num_value_heads=32,
    ),
    "Qwen3.6-27B": multimodal(
        "qwen3_5", hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
        num_key_value_heads=4, linear_num_value_heads=48, output_gate_type="swish",
    ),
    "Qwen3.5-35B-A3B": multimodal(
        "qwen3_5_moe", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
        linear_num_value_heads=32, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
}  # fmt: skip
NUM_PARAMETERS = {  # of the files, the head's included, and how many of them are the vision model's
    "Qwen3-Next-80B-A3B": (81_324_862_720, 0),
    "Qwen3.5-9B": (9_653_104_368, 456_010_480),
    "Qwen3.6-27B": (27_781_427_952, 460_730_096),
    "Qwen3.5-35B-A3B": (35_951_822_704, 446_571_248),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_text_model_and_the_head_are_what_the_files_hold_beside_vision(name: str) -> None:
    total, vision = NUM_PARAMETERS[name]
    assert count_parameters(CONFIGS[name]) == total - vision


def test_positions_rotate_a_quarter_of_a_head() -> None:
    for config in CONFIGS.values():
        rotary = FAMILIES[config["model_type"]].Config.from_json(config).rotary
        assert (rotary.rotary_dim, rotary.theta, rotary.kind) == (64, 1e7, "default")
