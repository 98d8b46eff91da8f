"""Nemotron-H: logits against transformers, and the same bits however a text is cut, batched, drafted or laid out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig, NemotronHForCausalLM

import mambalign.engine
from mambalign.worker.models.loader import CheckpointError
from mambalign.worker.models.nemotron_h import NemotronH
from mambalign.worker.models.registry import load_model
from mambalign.worker.tests.texts import (
    Memory,
    assert_logits_close,
    check_boundaries,
    check_every_cut,
    check_head_pieces,
    check_logits,
    check_random_schedule,
    random_ids,
    run,
    run_head,
    run_whole,
)

DEFAULT_MODEL = Path(mambalign.engine.__file__).parent / "default_model"

# Odd sizes on purpose: groups that are no power of two, head dims that fill no vector, a vocabulary that fills no tile.
SMALL = {
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


def write_checkpoint(folder: Path, pattern: str, **sizes) -> Path:
    """A random checkpoint, written by transformers, with an MTP head beside it."""
    torch.manual_seed(len(pattern) + sizes["hidden_size"])
    config = NemotronHConfig(
        hybrid_override_pattern=pattern, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*-",
        initializer_range=0.2, time_step_min=1e-6, **sizes,
    )  # fmt: skip
    model = NemotronHForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith((".D", "norm.weight", "norm_f.weight", "dt_bias", "conv1d.bias")):
            torch.nn.init.normal_(parameter, 1.0, 0.5)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {
        "0.enorm": (hidden,), "0.hnorm": (hidden,), "0.norm": (hidden,), "1.norm": (hidden,),
        "1.final_layernorm": (hidden,), "0.eh_proj": (hidden, 2 * hidden), "0.mixer.q_proj": (q, hidden),
        "0.mixer.k_proj": (kv, hidden), "0.mixer.v_proj": (kv, hidden), "0.mixer.o_proj": (hidden, q),
        "1.mixer.up_proj": (inner, hidden), "1.mixer.down_proj": (hidden, inner),
    }  # fmt: skip
    weights |= {f"mtp.layers.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    if config.mlp_bias:
        weights |= {
            "mtp.layers.1.mixer.up_proj.bias": torch.randn(inner),
            "mtp.layers.1.mixer.down_proj.bias": torch.randn(hidden),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=["default", *SMALL])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "default":
        return DEFAULT_MODEL
    return write_checkpoint(tmp_path_factory.mktemp("models") / request.param, **SMALL[request.param])


@pytest.fixture(scope="module")
def model(folder: Path) -> NemotronH:
    return load_model(folder, torch.float32, show_progress=False)


@pytest.fixture(scope="module")
def oracle(folder: Path):
    """transformers' model. Tied weights are tied by us: transformers' class does not do it."""
    loaded = NemotronHForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if loaded.config.tie_word_embeddings:
        loaded.lm_head.weight = loaded.model.embeddings.weight
    return loaded.eval()


def test_logits_of_prefill_chunks_and_decode_are_those_of_transformers(model, oracle) -> None:
    check_logits(model, oracle)


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_bits_do_not_depend_on_pieces_batch_or_drafts(model, layout: str) -> None:
    for seed in range(3):
        check_random_schedule(model, layout, seed, lengths=[1, 2, 3, 63, 100, 128, 129, 150])


def test_bits_with_many_rows(model) -> None:
    check_random_schedule(model, "SD", seed=7, lengths=[9, 10, 11, 12, 13, 14, 15, 16, 17, 40, 41])


def test_every_cut_of_a_prompt_gives_the_same_bits(model) -> None:
    check_every_cut(model)


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_a_boundary_state_is_the_state_after_exactly_its_tokens(model, layout: str) -> None:
    check_boundaries(model, layout)


@pytest.mark.parametrize("temporal_dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_state_is_rounded_after_every_token(model, temporal_dtype: torch.dtype) -> None:
    token_ids = random_ids(model, 30)
    whole = run_whole(model, token_ids, temporal_dtype)
    assert not torch.equal(whole, run_whole(model, token_ids))
    memory = Memory(model, "SD", temporal_dtype)
    text = memory.text(token_ids)
    pieces = []
    for stop in (1, 9, 10, 30):
        pieces.append(run(model, memory, [text], [token_ids[text.num_computed : stop]]))
        text.num_computed = stop
    assert torch.equal(torch.cat(pieces), whole)


def test_the_mtp_head_gives_the_same_bits_in_any_pieces(model) -> None:
    check_head_pieces(model)


def test_bfloat16_runs_and_is_close(folder: Path, oracle) -> None:
    model = load_model(folder, torch.bfloat16, show_progress=False)
    token_ids = random_ids(model, 50)
    hidden = run_whole(model, token_ids)
    with torch.inference_mode():
        ours, theirs = model.compute_logits(hidden), oracle(torch.tensor([token_ids])).logits[0]
    assert_logits_close(ours, theirs, torch.bfloat16)
    check_random_schedule(model, "SD", seed=1, lengths=[5, 40, 61])


@torch.inference_mode()
def test_the_head_of_the_default_model_predicts() -> None:
    """Teacher-forced: how often the head's first draft is the target's own next token, on text the target knows."""
    from tokenizers import Tokenizer

    model = load_model(DEFAULT_MODEL, torch.float32, show_progress=False)
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    token_ids = tokenizer.encode(Path(json.__file__).read_text()[2000:8000]).ids[:400]
    hidden = run_whole(model, token_ids)
    memory = Memory(model, "SD")
    text = memory.text(token_ids)
    text.num_computed = 1
    fed_back = run_head(model, memory, text, hidden[:-1], token_ids[1:])
    drafts, targets = model.mtp_logits(fed_back).argmax(-1), model.compute_logits(hidden[1:]).argmax(-1)
    assert (drafts == targets).float().mean() > 0.6


# The loader


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


def load(folder: Path) -> NemotronH:
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
        ({"model_type": "llama"}, "'llama' model; families served: nemotron_h"),
        ({"layers_block_type": ["linear_attention", "moe"]}, "mixture-of-experts layers are not served yet"),
        ({"layers_block_type": ["rwkv"]}, "unknown layer kind.*rwkv"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"mlp_hidden_act": "gelu"}, "mlp_hidden_act = 'gelu'; served: "),
        ({"hidden_size": None}, "hidden_size"),
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
