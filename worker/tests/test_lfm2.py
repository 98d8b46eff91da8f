"""LFM2: logits against transformers, and the same bits however a text is cut, batched, drafted or served."""

from pathlib import Path

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from mambalign.worker.models.registry import load_model
from mambalign.worker.tests.served import check_alone, check_bfloat16, check_served, write_checkpoint

CONV, ATTENTION = "conv", "full_attention"
# Odd sizes on purpose: heads and channels that fill no vector, a vocabulary that fills no tile.
SMALL = {
    "odd": dict(
        vocab_size=97, hidden_size=60, intermediate_size=77, layer_types=[CONV, ATTENTION, CONV],
        num_attention_heads=6, num_key_value_heads=2, block_multiple_of=3, block_ffn_dim_multiplier=1.3,
        norm_eps=0.05,
    ),
    "untied": dict(
        vocab_size=130, hidden_size=72, intermediate_size=51, layer_types=[ATTENTION, CONV], num_attention_heads=4,
        num_key_value_heads=1, block_auto_adjust_ff_dim=False, conv_bias=True, conv_L_cache=4,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=SMALL)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = SMALL[request.param]
    config = Lfm2Config(
        initializer_range=0.12,  # greedy texts repeat themselves, so that some drafts are kept
        max_position_embeddings=512,
        num_hidden_layers=len(sizes["layer_types"]),
        **sizes,
    )
    options = {} if config.tie_word_embeddings else {"max_shard_size": "30kB"}
    return write_checkpoint(tmp_path_factory.mktemp("models") / "lfm2", Lfm2ForCausalLM(config), **options)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Lfm2ForCausalLM:
    return Lfm2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_alone(folder: Path, oracle: Lfm2ForCausalLM) -> None:
    check_alone(load_model(folder, torch.float32, show_progress=False), oracle)


def test_bfloat16(folder: Path, oracle: Lfm2ForCausalLM) -> None:
    check_bfloat16(folder, oracle)


def test_served(folder: Path, oracle: Lfm2ForCausalLM) -> None:
    check_served(folder, oracle)
