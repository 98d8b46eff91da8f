"""Granite 4 hybrid: logits against transformers, the same bits however a text is cut, batched, drafted or served."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from mambalign.worker.models.granite_hybrid import GraniteHybrid
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

MAMBA, ATTENTION = "linear_attention", "full_attention"
MULTIPLIERS = dict(
    embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=0.3, logits_scaling=6, rms_norm_eps=0.05
)
SMALL = {
    "nope": dict(
        vocab_size=97, hidden_size=60, shared_intermediate_size=51, layer_types=[MAMBA, ATTENTION, MAMBA],
        num_attention_heads=6, num_key_value_heads=2, mamba_n_heads=6, mamba_n_groups=3, mamba_d_state=12,
        attention_bias=True, mamba_proj_bias=True, position_embedding_type="nope", num_local_experts=0, **MULTIPLIERS,
    ),
    "rotary, tied": dict(
        vocab_size=130, hidden_size=80, shared_intermediate_size=40, layer_types=[ATTENTION, MAMBA],
        num_attention_heads=4, num_key_value_heads=4, mamba_n_heads=10, mamba_n_groups=1, mamba_d_state=7,
        mamba_d_conv=2, mamba_conv_bias=False, position_embedding_type="rope", tie_word_embeddings=True,
        rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                         "original_max_position_embeddings": 32},
        num_local_experts=0, **MULTIPLIERS,
    ),
    "experts": dict(
        vocab_size=97, hidden_size=60, shared_intermediate_size=51, layer_types=[MAMBA, ATTENTION],
        num_attention_heads=6, num_key_value_heads=2, mamba_n_heads=6, mamba_n_groups=3, mamba_d_state=12,
        intermediate_size=26, num_local_experts=7, num_experts_per_tok=3, **MULTIPLIERS,
    ),
}  # fmt: skip
LAYERS = ["mamba"] * 5 + ["attention"] + (["mamba"] * 9 + ["attention"]) * 3 + ["mamba"] * 4
H_MICRO = dict(  # ibm-granite/granite-4.0-h-micro
    model_type="granitemoehybrid", vocab_size=100352, hidden_size=2048, layer_types=LAYERS, num_hidden_layers=40,
    shared_intermediate_size=8192, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
    mamba_n_heads=64, mamba_d_head=64, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2, mamba_n_groups=1,
    mamba_conv_bias=True, mamba_proj_bias=False, num_local_experts=0, num_experts_per_tok=0, embedding_multiplier=12,
    residual_multiplier=0.22, attention_multiplier=0.015625, logits_scaling=8, position_embedding_type="nope",
    max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=10000, rope_scaling=None, tie_word_embeddings=True,
    hidden_act="silu", attention_bias=False, eos_token_id=100257,
)  # fmt: skip

H_TINY = H_MICRO | dict(  # ibm-granite/granite-4.0-h-tiny, its shapes
    hidden_size=1536, shared_intermediate_size=1024, intermediate_size=512, num_attention_heads=12,
    num_key_value_heads=4, mamba_n_heads=48, num_local_experts=64, num_experts_per_tok=6,
)  # fmt: skip
H_SMALL = H_MICRO | dict(  # ibm-granite/granite-4.0-h-small, its shapes
    hidden_size=4096, shared_intermediate_size=1536, intermediate_size=768, mamba_n_heads=128, num_local_experts=72,
    num_experts_per_tok=10,
)  # fmt: skip


@pytest.fixture(scope="module", params=SMALL)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, SMALL[request.param])
    options = {"max_shard_size": "30kB"} if model.config.tie_word_embeddings else {}
    return write_checkpoint(tmp_path_factory.mktemp("models") / "granite", model, **options)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> GraniteMoeHybridForCausalLM:
    return load_oracle(folder)


def test_alone(folder: Path, oracle: GraniteMoeHybridForCausalLM) -> None:
    check_alone(load_model(folder, torch.float32, show_progress=False), oracle)


def test_bfloat16(folder: Path, oracle: GraniteMoeHybridForCausalLM) -> None:
    check_bfloat16(folder, oracle)


def test_served(folder: Path, oracle: GraniteMoeHybridForCausalLM) -> None:
    check_served(folder, oracle)


def test_published_layer_names_are_the_newer_ones(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    old = {MAMBA: "mamba", ATTENTION: "attention"}
    as_published = config | {"layer_types": [old[name] for name in config["layer_types"]]}
    assert GraniteHybrid.Config.from_json(as_published) == GraniteHybrid.Config.from_json(config)


def test_published_models_have_their_numbers_of_parameters() -> None:
    assert count_parameters(H_MICRO) == pytest.approx(3.19e9, rel=0.001)
    assert count_parameters(H_TINY) == pytest.approx(6.94e9, rel=0.001)
    assert count_parameters(H_SMALL) == pytest.approx(32.2e9, rel=0.001)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["attention"] * 40}, "no layer of mamba among 40"),
        ({"layer_types": ["rwkv"]}, "unknown layer kind.*rwkv"),
        ({"residual_multiplier": 0.0}, "residual_multiplier = 0.0"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "5 experts a token of 4"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        GraniteHybrid.Config.from_json(H_MICRO | changes)
