"""LFM2: logits against transformers, and the same bits however a text is cut, batched, drafted or served."""

from pathlib import Path

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM, PreTrainedModel

from mambalign.engine import LLM
from mambalign.engine.option import ConfigError
from mambalign.worker.models.loader import CheckpointError
from mambalign.worker.models.registry import FAMILIES, load_model
from mambalign.worker.tests.served import (
    check_alone,
    check_bfloat16,
    check_served,
    count_parameters,
    load_oracle,
    random_model,
    write_checkpoint,
)

CONV, ATTENTION = "conv", "full_attention"
# Odd sizes on purpose: heads and channels that fill no vector, a vocabulary that fills no tile; each width of a conv.
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
    "experts": dict(
        vocab_size=97, hidden_size=60, intermediate_size=51, layer_types=[CONV, ATTENTION, CONV],
        num_attention_heads=6, num_key_value_heads=2, conv_L_cache=2, num_dense_layers=1, moe_intermediate_size=26,
        num_experts=7, num_experts_per_tok=3, routed_scaling_factor=1.5,
    ),
}  # fmt: skip
COMMON = dict(
    vocab_size=65536, num_key_value_heads=8, conv_L_cache=3, conv_bias=False, norm_eps=1e-5, rope_theta=1e6,
    max_position_embeddings=128000, eos_token_id=7,
)  # fmt: skip
DENSE = COMMON | dict(
    model_type="lfm2", num_hidden_layers=16, full_attn_idxs=[2, 5, 8, 10, 12, 14], block_auto_adjust_ff_dim=True,
    block_ffn_dim_multiplier=1.0, block_multiple_of=256,
)  # fmt: skip
PUBLISHED = {
    "LFM2-350M": DENSE | dict(hidden_size=1024, num_attention_heads=16, block_ff_dim=6656),
    "LFM2-700M": DENSE | dict(hidden_size=1536, num_attention_heads=24, block_ff_dim=10240),
    "LFM2-1.2B": DENSE | dict(hidden_size=2048, num_attention_heads=32, block_ff_dim=12288, intermediate_size=8192),
    # where its 8 layers with attention stand is not said by the number of parameters
    "LFM2-2.6B": DENSE | dict(
        hidden_size=2048, num_attention_heads=32, block_ff_dim=10752, block_auto_adjust_ff_dim=False,
        num_hidden_layers=30, full_attn_idxs=[2, 5, 9, 13, 17, 21, 25, 28],
    ),
    "LFM2-8B-A1B": COMMON | dict(
        model_type="lfm2_moe", hidden_size=2048, num_attention_heads=32, intermediate_size=7168, num_dense_layers=2,
        layer_types=[ATTENTION if i in (2, 6, 10, 14, 18, 21) else CONV for i in range(24)],
        moe_intermediate_size=1792, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True, use_expert_bias=True,
        routed_scaling_factor=1.0,
    ),
}  # fmt: skip
NUM_PARAMETERS = {  # as the model cards say
    "LFM2-350M": 354_483_968,
    "LFM2-700M": 742_489_344,
    "LFM2-1.2B": 1_170_340_608,
    "LFM2-2.6B": 2_569_272_320,
    "LFM2-8B-A1B": pytest.approx(8.3e9, rel=0.01),  # by its rounded name
}


@pytest.fixture(scope="module", params=SMALL)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = SMALL[request.param]
    classes = (Lfm2MoeForCausalLM, Lfm2MoeConfig) if "num_experts" in sizes else (Lfm2ForCausalLM, Lfm2Config)
    model = random_model(
        *classes,
        sizes,
        seed=3,  # rounded to 16 bits, too, scores send each token to the same experts
        initializer_range=0.12,  # greedy texts repeat themselves, so that some drafts are kept
    )
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.5)
    options = {} if model.config.tie_word_embeddings else {"max_shard_size": "30kB"}
    return write_checkpoint(tmp_path_factory.mktemp("models") / "lfm2", model, **options)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return load_oracle(folder)


def test_alone(folder: Path, oracle: PreTrainedModel) -> None:
    model = load_model(folder, torch.float32, show_progress=False)
    assert {spec.kind for spec in model.state_specs()} == {"conv"}
    check_alone(model, oracle)


def test_bfloat16(folder: Path, oracle: PreTrainedModel) -> None:
    check_bfloat16(folder, oracle)


def test_served(folder: Path, oracle: PreTrainedModel) -> None:
    check_served(folder, oracle)


def test_options_of_a_scan_are_refused_and_nothing_is_said_of_one(folder: Path) -> None:
    options = dict(device="cpu", cache_memory=64 << 20)
    with LLM(str(folder), **options) as llm:
        assert llm.core.plan[1] == "runner: v2, conv states SD"
    with pytest.raises(ConfigError, match="--prefill-scan chunked: no layer of this model has a scan"):
        LLM(str(folder), **options, prefill_scan="chunked")
    with pytest.raises(ConfigError, match=r"--mamba-ssm-cache-dtype: .* has no temporal states"):
        LLM(str(folder), **options, mamba_ssm_cache_dtype="bfloat16")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_numbers_of_parameters(name: str) -> None:
    assert count_parameters(PUBLISHED[name]) == NUM_PARAMETERS[name]


def parse(config: dict):
    return FAMILIES[config["model_type"]].Config.from_json(config)


def test_older_and_newer_notations_mean_the_same() -> None:
    old = PUBLISHED["LFM2-1.2B"]
    renamed = {"full_attn_idxs": None, "block_ff_dim": None, "rope_theta": None}
    new = old | renamed | dict(
        layer_types=[ATTENTION if i in old["full_attn_idxs"] else CONV for i in range(16)], intermediate_size=12288,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    )  # fmt: skip
    assert parse(new) == parse(old) and parse(old).mlp_width == 8192
    assert parse(old | {"tie_embedding": False}) == parse(new | {"tie_word_embeddings": False}) != parse(old)
    assert parse(old | {"rope_theta": None}) == parse(old)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("LFM2-1.2B", {"full_attn_idxs": [16]}, r"full_attn_idxs = \[16\] of 16 layers"),
        ("LFM2-1.2B", {"full_attn_idxs": []}, "no layer of full_attention among 16"),
        ("LFM2-1.2B", {"full_attn_idxs": None}, "no layer of conv among 16"),
        ("LFM2-1.2B", {"layer_types": [CONV, "mamba"]}, "layer_types with mamba"),
        ("LFM2-1.2B", {"conv_L_cache": 5}, "conv_L_cache = 5; served: 2 to 4"),
        ("LFM2-1.2B", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ("LFM2-8B-A1B", {"num_experts_per_tok": 33}, "33 experts a token of 32"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(name: str, changes: dict, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        parse(PUBLISHED[name] | changes)
