"""Zamba2: logits against transformers, and the same bits however a text is cut, batched, drafted or served."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Zamba2Config, Zamba2ForCausalLM

from mambalign.worker.models.checkpoint_files import SINGLE_FILE
from mambalign.worker.models.loader import CheckpointError
from mambalign.worker.models.registry import load_model
from mambalign.worker.models.zamba2 import Zamba2
from mambalign.worker.tests.served import (
    check_alone,
    check_bfloat16,
    check_served,
    count_parameters,
    load_oracle,
    random_model,
    write_checkpoint,
)
from mambalign.worker.tests.texts import check_logits

MAMBA, HYBRID = "linear_attention", "hybrid"
# Odd sizes on purpose: groups and heads that are no power of two, ranks that fill no vector, a vocabulary that fills no
# tile. A shared transformer that is used three times, two that take turns, and with an untied head one a use. It has no
# residual: with larger weights it magnifies rounding, transformers' as much as ours.
RANGE = dict(initializer_range=0.12)
SMALL = {
    "one block": RANGE | dict(
        vocab_size=97, hidden_size=48, intermediate_size=51, num_hidden_layers=5, num_attention_heads=6,
        layers_block_type=[HYBRID, MAMBA, HYBRID, HYBRID, MAMBA], n_mamba_heads=6, mamba_ngroups=3, mamba_d_state=12,
        adapter_rank=5, use_shared_attention_adapter=True, use_mem_rope=True, rms_norm_eps=0.05,
    ),
    "two blocks": RANGE | dict(
        vocab_size=130, hidden_size=40, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        layers_block_type=[MAMBA, MAMBA, HYBRID, HYBRID, MAMBA, HYBRID], n_mamba_heads=10, mamba_ngroups=2,
        mamba_d_state=7, mamba_d_conv=3, adapter_rank=9, num_mem_blocks=2, add_bias_linear=True,
    ),
    "untied": RANGE | dict(
        vocab_size=97, hidden_size=36, intermediate_size=51, num_hidden_layers=4, num_attention_heads=3,
        layers_block_type=[MAMBA, HYBRID, HYBRID, HYBRID], n_mamba_heads=3, mamba_d_state=12, adapter_rank=5,
        num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True, tie_word_embeddings=False,
    ),
}  # fmt: skip


def config_of(hybrid_ids: list[int], num_layers: int, **sizes: int | bool) -> dict:
    """A published config.json."""
    kinds = ["hybrid" if i in hybrid_ids else "mamba" for i in range(num_layers)]
    same = dict(
        model_type="zamba2", vocab_size=32000, num_attention_heads=32, num_key_value_heads=32, adapter_rank=128,
        mamba_d_conv=4, mamba_expand=2, mamba_headdim=64, max_position_embeddings=4096, hidden_act="gelu",
        add_bias_linear=False, rms_norm_eps=1e-5, rope_theta=10000, time_step_limit=None, time_step_min=0.001,
        use_conv_bias=True, use_long_context=False, tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip
    return same | dict(hybrid_layer_ids=hybrid_ids, layers_block_type=kinds, num_hidden_layers=num_layers) | sizes


PUBLISHED = {  # of Zyphra
    "Zamba2-1.2B": config_of(
        [5, 11, 17, 23, 29, 35], 38, hidden_size=2048, intermediate_size=8192, n_mamba_heads=64, mamba_ngroups=1,
        mamba_d_state=128, num_mem_blocks=1, use_mem_rope=True, use_shared_attention_adapter=True,
    ),
    "Zamba2-2.7B": config_of(
        [6, 12, 18, 24, 30, 36, 42, 47, 51], 54, hidden_size=2560, intermediate_size=10240, n_mamba_heads=80,
        mamba_ngroups=1, mamba_d_state=64, num_mem_blocks=2, use_mem_rope=False, use_shared_attention_adapter=False,
    ),
    "Zamba2-7B": config_of(
        [6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77], 81, hidden_size=3584, intermediate_size=14336,
        n_mamba_heads=112, mamba_ngroups=2, mamba_d_state=64, num_mem_blocks=2, use_mem_rope=True,
        use_shared_attention_adapter=False,
    ),
}  # fmt: skip
NUM_PARAMETERS = {
    "Zamba2-1.2B": 1_215_064_704,  # by the header of its file
    "Zamba2-2.7B": pytest.approx(5.324e9 / 2, rel=0.002),  # by the rounded sizes of its files in 16 bits
    "Zamba2-7B": pytest.approx(14.71e9 / 2, rel=0.002),
}


@pytest.fixture(scope="module", params=SMALL)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(Zamba2ForCausalLM, Zamba2Config, SMALL[request.param])
    options = {"max_shard_size": "30kB"} if request.param == "two blocks" else {}
    return write_checkpoint(tmp_path_factory.mktemp("models") / "zamba2", model, **options)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return load_oracle(folder)


def test_alone(folder: Path, oracle: PreTrainedModel) -> None:
    check_alone(load_model(folder, torch.float32, show_progress=False), oracle)


def test_bfloat16(folder: Path, oracle: PreTrainedModel) -> None:
    check_bfloat16(folder, oracle)


def test_served(folder: Path, oracle: PreTrainedModel) -> None:
    check_served(folder, oracle)


def test_steps_of_time_have_the_published_minimum(tmp_path: Path) -> None:
    model = random_model(Zamba2ForCausalLM, Zamba2Config, SMALL["two blocks"], time_step_min=1.2)
    folder = write_checkpoint(tmp_path / "model", model)
    ours = load_model(folder, torch.float32, show_progress=False)
    assert {block.mixer.dt_min for block in ours.blocks} == {1.2}
    check_logits(ours, load_oracle(folder))


def test_additions_that_no_use_reads_are_known_and_others_are_not(tmp_path: Path) -> None:
    model = random_model(Zamba2ForCausalLM, Zamba2Config, SMALL["two blocks"])
    folder = write_checkpoint(tmp_path / "model", model)
    weights = load_file(folder / SINGLE_FILE)
    taken = "model.layers.2.shared_transformer.feed_forward.gate_up_proj_adapter_list.{}.0.weight"
    save_file(weights | {taken.format(1): torch.zeros(9, 40)}, folder / SINGLE_FILE)  # the second use is the other's
    load_model(folder, torch.float32, show_progress=False)
    save_file(weights | {taken.format(3): torch.zeros(9, 40)}, folder / SINGLE_FILE)  # there are three
    with pytest.raises(CheckpointError, match=f"1 unexpected: {taken.format(3)}"):
        load_model(folder, torch.float32, show_progress=False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_numbers_of_parameters(name: str) -> None:
    assert count_parameters(PUBLISHED[name]) == NUM_PARAMETERS[name]
    assert (Zamba2.Config.from_json(PUBLISHED[name]).rotary is not None) == PUBLISHED[name]["use_mem_rope"]


def test_older_and_newer_notations_mean_the_same() -> None:
    old = PUBLISHED["Zamba2-2.7B"]
    kinds = [HYBRID if kind == "hybrid" else MAMBA for kind in old["layers_block_type"]]
    new = {name: value for name, value in old.items() if name not in ("hybrid_layer_ids", "rope_theta")}
    new |= {"layers_block_type": kinds, "num_key_value_heads": None, "intermediate_size": None}
    assert Zamba2.Config.from_json(new) == Zamba2.Config.from_json(old)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layers_block_type": ["m", "g"]}, "layers_block_type with g, m; served: mamba, linear_attention, hybrid"),
        ({"layers_block_type": None}, "lacks layers_block_type"),
        ({"layers_block_type": ["mamba"] * 9, "hybrid_layer_ids": []}, "no layer of attention among 9"),
        ({"hybrid_layer_ids": [5, 11]}, r"hybrid_layer_ids = \[5, 11\]; served: \[6, 12, 18, 24, 30, 36, 42, 47, 51\]"),
        ({"hidden_act": "silu"}, "hidden_act = 'silu'; served: gelu"),
        ({"use_long_context": True}, "use_long_context = True"),
        ({"time_step_limit": [0.01, 0.1]}, "time_step_limit"),
        ({"n_mamba_heads": 7}, "n_mamba_heads = 7 of 5120 channels"),
        ({"num_attention_heads": 33}, "num_attention_heads = 33 of 5120 channels"),
        ({"num_key_value_heads": 8, "use_shared_attention_adapter": True}, "num_key_value_heads = 8; served: 32"),
        ({"num_mem_blocks": 0}, "num_mem_blocks = 0"),
        ({"use_mem_rope": True, "rope_scaling": {"type": "dynamic"}}, "rope_type = 'dynamic'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        Zamba2.Config.from_json(PUBLISHED["Zamba2-2.7B"] | changes)
