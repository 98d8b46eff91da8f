"""Bamba: logits against transformers, and the same bits however a text is cut, batched, drafted or served."""

from pathlib import Path

import pytest
import torch
from transformers import BambaConfig, BambaForCausalLM

from mambalign.worker.models.bamba import Bamba
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

# Odd sizes on purpose: groups that are no power of two, heads that fill no vector, a vocabulary that fills no tile.
SMALL = {
    "odd": dict(
        vocab_size=97, hidden_size=72, intermediate_size=51, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=6, mamba_n_groups=3, mamba_d_state=12,
        attention_bias=True, mlp_bias=True, mamba_proj_bias=True, rms_norm_eps=0.05,
    ),
    "tied": dict(
        vocab_size=130, hidden_size=80, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, attn_layer_indices=[0, 2], mamba_n_heads=10, mamba_n_groups=1, mamba_d_state=7,
        mamba_d_conv=2, mamba_conv_bias=False, tie_word_embeddings=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
}  # fmt: skip
BAMBA_9B = dict(  # ibm-ai-platform/Bamba-9B
    model_type="bamba", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, attn_layer_indices=[9, 18, 27], attn_rotary_emb=64, rope_theta=1e4,
    mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2, mamba_n_groups=1,
    max_position_embeddings=262144, hidden_act="silu", rms_norm_eps=1e-5, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module", params=SMALL)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(BambaForCausalLM, BambaConfig, SMALL[request.param], eos_token_id=2)
    options = {"max_shard_size": "30kB"} if request.param == "tied" else {}
    return write_checkpoint(tmp_path_factory.mktemp("models") / "bamba", model, **options)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> BambaForCausalLM:
    return load_oracle(folder)


def test_alone(folder: Path, oracle: BambaForCausalLM) -> None:
    check_alone(load_model(folder, torch.float32, show_progress=False), oracle)


def test_bfloat16(folder: Path, oracle: BambaForCausalLM) -> None:
    check_bfloat16(folder, oracle)


def test_served(folder: Path, oracle: BambaForCausalLM) -> None:
    check_served(folder, oracle)


def test_the_published_model_has_its_number_of_parameters() -> None:
    assert count_parameters(BAMBA_9B) == pytest.approx(9.78e9, rel=0.001)  # also published as Bamba-9.8b
    assert Bamba.Config.from_json(BAMBA_9B).rotary.rotary_dim == BAMBA_9B["attn_rotary_emb"]


def test_a_number_of_layers_that_is_null_is_the_familys_own() -> None:
    assert Bamba.Config.from_json(BAMBA_9B | {"num_hidden_layers": None}) == Bamba.Config.from_json(BAMBA_9B)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"time_step_limit": [0.01, 0.1]}, "time_step_limit"),
        ({"time_step_limit": ["x", 1.0]}, "'x' is no number"),
        ({"attn_layer_indices": [40]}, "attn_layer_indices"),
        ({"attn_layer_indices": []}, "no layer of attention among 32"),
        ({"mamba_n_heads": 5}, "mamba_n_heads"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        Bamba.Config.from_json({name: value for name, value in (BAMBA_9B | changes).items() if value is not None})
