"""The loader: shards, names and shapes that do not fit, and what is refused before any weight is read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mambalign.engine.checkpoint import read_facts
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.loader import CheckpointError
from mambalign.worker.models.registry import load_model
from mambalign.worker.tests.nemotron_checkpoints import SMALL, write_checkpoint
from mambalign.worker.tests.texts import run_whole


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", **SMALL["odd"])


def rewrite(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(folder: Path) -> HybridModel:
    return load_model(folder, torch.float32, show_progress=False)


def test_missing_unexpected_and_misshaped_weights_are_named_together(small: Path) -> None:
    def change(weights: dict) -> None:
        weights["backbone.surprise"] = torch.zeros(1)
        del weights["backbone.norm_f.weight"]
        weights["backbone.layers.0.mixer.D"] = torch.zeros(7)

    rewrite(small, change)
    with pytest.raises(CheckpointError) as error:
        load(small)
    assert "1 missing: backbone.norm_f.weight" in str(error.value)
    assert "1 unexpected: backbone.surprise" in str(error.value)
    assert "backbone.layers.0.mixer.D: [7] in the file, [6] by config.json" in str(error.value)


def test_sharded_checkpoints(small: Path) -> None:
    weights = load_file(small / "model.safetensors")
    whole = run_whole(load(small), list(range(3, 20)))
    (small / "model.safetensors").unlink()
    shards = {"a.safetensors": dict(list(weights.items())[::2]), "b.safetensors": dict(list(weights.items())[1::2])}
    for name, tensors in shards.items():
        save_file(tensors, small / name)
    index = {"weight_map": {weight: name for name, tensors in shards.items() for weight in tensors}}
    (small / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(run_whole(load(small), list(range(3, 20))), whole)
    (small / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the shards.*b\.safetensors"):
        load(small)


def test_pickled_weights_are_refused(small: Path) -> None:
    (small / "model.safetensors").rename(small / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled weights only \(pytorch_model\.bin\)"):
        load(small)


def test_a_head_that_the_checkpoint_lacks_is_none(small: Path) -> None:
    assert load(small).has_mtp
    rewrite(small, lambda weights: [weights.pop(name) for name in list(weights) if name.startswith("mtp.")])
    model = load(small)
    assert not model.has_mtp
    assert [spec.kind for spec in model.state_specs()] == ["conv", "temporal"] * 2
    assert len(model.attention_specs()) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "llama"}, "'llama' model; families served: .*nemotron_h"),
        ({"layers_block_type": ["moe"], "moe_intermediate_size": 0}, "layers of experts and no moe_intermediate_size"),
        ({"layers_block_type": ["moe"], "num_experts_per_tok": 9}, "9 experts a token of 8"),
        ({"layers_block_type": ["rwkv"]}, "unknown layer kind.*rwkv"),
        ({"layers_block_type": ["mamba", "mlp"]}, "all layers with a mixer are of one kind"),
        ({"layers_block_type": ["attention", "mlp"]}, "all layers with a mixer are of one kind"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"mlp_hidden_act": "gelu"}, "mlp_hidden_act = 'gelu'; served: "),
        ({"hidden_size": None}, "hidden_size"),
        ({"layers_block_type": 5}, "layers_block_type = 5; served: lists"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers = '4'; served: whole numbers"),
        ({"mamba_expand": "2"}, "mamba_expand = '2'; served: numbers"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(small: Path, changes: dict, text: str) -> None:
    edit_config(small, **changes)
    with pytest.raises(CheckpointError, match=text):
        load(small)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        load(tmp_path)


def quantized(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] in fp8, and its blocks' scales, written as a loop."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    scale, values = torch.empty(rows, columns), torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale[i, j] = weight[part].abs().max() / 448
            values[part] = weight[part] / scale[i, j]
    return values.to(torch.float8_e4m3fn), scale


def test_fp8_weights_with_block_scales_become_plain_ones(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", **SMALL["experts"])
    block = (16, 32)
    plain = load_file(folder / "model.safetensors")
    packed = {}
    for name, weight in plain.items():
        if "mixer" in name and name.endswith(("proj.weight", "proj")) and weight.ndim == 2:
            values, scale = quantized(weight, block)
            packed |= {name: values, f"{name}_scale_inv": scale}
            each = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            plain[name] = values.float() * each[: weight.shape[0], : weight.shape[1]]
        else:
            packed[name] = weight
    assert any(".experts.0.up_proj.weight_scale_inv" in name for name in packed)
    save_file(plain, folder / "model.safetensors")
    whole = run_whole(load(folder), list(range(3, 20)))
    save_file(packed, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)})
    assert torch.equal(run_whole(load(folder), list(range(3, 20))), whole)
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [8, 32]})
    with pytest.raises(CheckpointError, match=r"of the wrong shape: backbone\.\S+_scale_inv: \["):
        load(folder)


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ({"quant_method": "fp8"}, r"quantised \(fp8\)"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "fp8, e5m2"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt, NVFP4"),
        ({"quant_method": "gptq", "bits": 4}, "gptq, 4"),
        ({"quant_method": "awq", "bits": 4}, "awq, 4"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
    ],
)
def test_other_quantised_checkpoints_are_refused_by_name(small: Path, quantization: dict, text: str) -> None:
    edit_config(small, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=text):
        load(small)
    edit_config(small, quantization_config=None, text_config={"quantization_config": quantization})
    with pytest.raises(CheckpointError, match=text):
        load(small)


def test_a_quantised_checkpoint_that_says_so_in_a_file_of_its_own(small: Path) -> None:
    (small / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(CheckpointError, match=r"quantised \(FP8\)"):
        load(small)


def as_text_part(folder: Path, field: str) -> None:
    """Make the checkpoint the text part of a multimodal one."""
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "NemotronH_Nano_Omni_Reasoning_V3", field: config, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    weights = load_file(folder / "model.safetensors")
    weights = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    save_file(weights | {"vision_model.embedding": torch.zeros(3)}, folder / "model.safetensors")


@pytest.mark.parametrize("field", ["text_config", "llm_config"])
def test_the_text_part_of_a_multimodal_checkpoint(small: Path, field: str) -> None:
    whole = run_whole(load(small), list(range(3, 20)))
    as_text_part(small, field)
    model = load(small)
    assert model.has_mtp and torch.equal(run_whole(model, list(range(3, 20))), whole)
    assert read_facts(None, small).vocab_size == model.vocab_size
    rewrite(small, lambda weights: weights.pop("language_model.backbone.norm_f.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing: language_model\.backbone\.norm_f\.weight$"):
        load(small)
    edit_config(small, **{field: None})
    with pytest.raises(CheckpointError, match="none of text_config, llm_config"):
        load(small)


def test_tokens_that_end_a_text_are_those_of_both_files(small: Path) -> None:
    assert load(small).eos_token_ids == (2,)
    (small / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 2]}))
    assert load(small).eos_token_ids == (2, 11)
    (small / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    as_text_part(small, "text_config")
    assert load(small).eos_token_ids == (2, 7)
    (small / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not valid JSON"):
        load(small)
