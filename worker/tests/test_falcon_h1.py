"""Falcon-H1: logits against transformers, and the same bits however a text is cut, batched, drafted or served."""

from pathlib import Path

import pytest
import torch
from transformers import FalconH1Config, FalconH1ForCausalLM

from mambalign.worker.models.falcon_h1 import FalconH1
from mambalign.worker.models.loader import CheckpointError
from mambalign.worker.models.registry import load_model
from mambalign.worker.tests.served import (
    check_alone,
    check_bfloat16,
    check_served,
    count_parameters,
    load_oracle,
    random_model,
    write_checkpoint,
)

# No two multipliers alike, so that one in the wrong place shows; an eps that shows too.
MULTIPLIERS = dict(
    embedding_multiplier=5.6, lm_head_multiplier=0.39, key_multiplier=0.41, attention_in_multiplier=0.7,
    attention_out_multiplier=0.3, ssm_in_multiplier=1.25, ssm_out_multiplier=0.23,
    ssm_multipliers=[0.35, 0.25, 0.18, 0.5, 0.31], mlp_multipliers=[0.88, 0.19], rms_norm_eps=0.05,
)  # fmt: skip
BIASES = dict(attention_bias=True, mlp_bias=True, mamba_proj_bias=True, projectors_bias=True)
ODD = dict(
    vocab_size=97, hidden_size=60, intermediate_size=51, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, mamba_d_ssm=72, mamba_n_heads=6, mamba_n_groups=3, mamba_d_state=12, **MULTIPLIERS,
)  # fmt: skip
SMALL = {
    "gate alone": ODD | BIASES,
    "gate, then norm": ODD | dict(mamba_rms_norm=True, mamba_norm_before_gate=False),
    "norm, then gate": ODD | BIASES | dict(mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_proj_bias=False),
    "tied": dict(
        vocab_size=130, hidden_size=40, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=4, mamba_d_ssm=None, mamba_n_heads=5, mamba_n_groups=1, mamba_d_state=7, mamba_d_conv=2,
        mamba_conv_bias=False, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e11},
    ),
}  # fmt: skip
FALCON_H1_500M = dict(  # tiiuae/Falcon-H1-0.5B-Base
    model_type="falcon_h1", vocab_size=32784, hidden_size=1024, intermediate_size=2048, num_hidden_layers=36,
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64,
    mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False,
    mamba_rms_norm=False, mamba_norm_before_gate=False, projectors_bias=False, attention_bias=False, mlp_bias=False,
    attention_in_multiplier=1.0, attention_out_multiplier=0.9375, embedding_multiplier=5.656854249492381,
    key_multiplier=0.39062499999999994, lm_head_multiplier=0.0390625, ssm_in_multiplier=1.25,
    mlp_multipliers=[0.8838834764831844, 0.5859375], ssm_out_multiplier=0.23570226039551587,
    ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738], attn_layer_indices=None,
    max_position_embeddings=16384, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1e11, tie_word_embeddings=False,
    hidden_act="silu", torch_dtype="bfloat16", eos_token_id=11,
)  # fmt: skip
FALCON_H1_7B = FALCON_H1_500M | dict(  # tiiuae/Falcon-H1-7B-Base, its shapes
    vocab_size=130048, hidden_size=3072, intermediate_size=12288, num_hidden_layers=44, num_attention_heads=12,
    head_dim=128, mamba_d_ssm=3072, mamba_d_head=128, mamba_d_state=256, max_position_embeddings=262144,
)  # fmt: skip


@pytest.fixture(scope="module", params=SMALL)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(FalconH1ForCausalLM, FalconH1Config, SMALL[request.param])
    options = {"max_shard_size": "30kB"} if request.param == "tied" else {}
    return write_checkpoint(tmp_path_factory.mktemp("models") / "falcon", model, **options)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> FalconH1ForCausalLM:
    return load_oracle(folder)


def test_alone(folder: Path, oracle: FalconH1ForCausalLM) -> None:
    check_alone(load_model(folder, torch.float32, show_progress=False), oracle)


def test_bfloat16(folder: Path, oracle: FalconH1ForCausalLM) -> None:
    check_bfloat16(folder, oracle)


def test_served(folder: Path, oracle: FalconH1ForCausalLM) -> None:
    check_served(folder, oracle)


def test_a_checkpoint_in_bfloat16_is_that_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FalconH1ForCausalLM(FalconH1Config(initializer_range=0.2, max_position_embeddings=512, **ODD))
    folder = write_checkpoint(tmp_path / "falcon", model, torch.bfloat16)
    oracle = load_oracle(folder)
    check_bfloat16(folder, oracle)


def test_published_models_have_their_numbers_of_parameters() -> None:
    assert count_parameters(FALCON_H1_500M) == pytest.approx(521e6, rel=0.001)
    assert count_parameters(FALCON_H1_7B) == pytest.approx(7.59e9, rel=0.001)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention_out_multiplier": 0.0}, "attention_out_multiplier = 0.0"),
        ({"ssm_multipliers": [1.0, 1.0, -1.0, 1.0, 1.0]}, "ssm_multipliers"),
        ({"ssm_multipliers": [1.0, 1.0]}, "ssm_multipliers"),
        ({"mlp_multipliers": []}, r"mlp_multipliers = \(\); served: 2 of them"),
        ({"mamba_d_ssm": 1000}, "mamba_n_heads 24 x mamba_d_head 64 is not 1000"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type = 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type = 'linear' without factor"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        FalconH1.Config.from_json(FALCON_H1_500M | changes)
