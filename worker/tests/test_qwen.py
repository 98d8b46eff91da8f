"""Qwen3-Next and Qwen3.5: logits against transformers, the head against a plain one, the same bits in any schedule."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from mambalign.kernels.tolerances import tolerance
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.loader import CheckpointError
from mambalign.worker.models.qwen3_next import Qwen3Next
from mambalign.worker.models.registry import load_model
from mambalign.worker.tests.served import DEFAULT_MODEL, check_alone, check_bfloat16, check_served
from mambalign.worker.tests.texts import Memory, check_head_pieces, random_ids, run, run_head, run_whole

D, A = "linear_attention", "full_attention"
VISION = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2)

# Odd sizes on purpose: heads that are no power of two, head dims that fill no vector, a vocabulary that fills no tile.
SMALL = {
    "text": dict(
        model_type="qwen3_5_text", layer_types=[D, A, D], hidden_size=48, intermediate_size=61, num_attention_heads=6,
        num_key_value_heads=2, head_dim=24, linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=10,
        linear_value_head_dim=12, vocab_size=97, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
        "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1], "mrope_interleaved": True},
    ),
    "multimodal": dict(
        model_type="qwen3_5", layer_types=[A, D, D, A], hidden_size=72, intermediate_size=40, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=7, vocab_size=130, linear_conv_kernel_dim=2, tie_word_embeddings=True,
    ),
    "next": dict(
        model_type="qwen3_next", layer_types=[D, D, A], hidden_size=64, intermediate_size=24, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16,
        linear_value_head_dim=20, vocab_size=64, linear_conv_kernel_dim=3, num_experts=0,
    ),
    "next_moe": dict(
        model_type="qwen3_next", layer_types=[D, A, D], hidden_size=40, intermediate_size=36, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=9,
        linear_value_head_dim=8, vocab_size=101, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
        shared_expert_intermediate_size=28, mlp_only_layers=[1], norm_topk_prob=False,
    ),
    "moe": dict(
        model_type="qwen3_5_moe", layer_types=[D, A], hidden_size=56, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=8, linear_value_head_dim=16,
        vocab_size=99, num_experts=10, num_experts_per_tok=7, moe_intermediate_size=12,
        shared_expert_intermediate_size=17,
    ),
    "moe_text": dict(
        model_type="qwen3_5_moe_text", layer_types=[A, D], hidden_size=64, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, linear_num_key_heads=1, linear_num_value_heads=5, linear_key_head_dim=16, linear_value_head_dim=6,
        vocab_size=67, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
    ),
}  # fmt: skip
CLASSES = {
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
}


def build(folder: Path, model_type: str, **sizes) -> Path:
    """A random checkpoint, written by transformers in one shard or several, with an MTP head beside it."""
    torch.manual_seed(sizes["hidden_size"])
    config_class, model_class = CLASSES[model_type]
    sizes = {"initializer_range": 0.05, "max_position_embeddings": 512, "eos_token_id": 2} | sizes
    sizes["num_hidden_layers"] = len(sizes["layer_types"])
    if model_type != "qwen3_next":  # whose published config.json does not tell of the head
        sizes["mtp_num_hidden_layers"] = 1
    config = config_class(**sizes)
    if model_type in ("qwen3_5", "qwen3_5_moe"):
        tied, vision = sizes.get("tie_word_embeddings", False), VISION | {"out_hidden_size": sizes["hidden_size"]}
        config = config_class(text_config=sizes, vision_config=vision, tie_word_embeddings=tied)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith((".dt_bias", ".A_log")):
            torch.nn.init.normal_(parameter, 0.5 if name.endswith("linear_attn.norm.weight") else 0.0, 0.3)
    model.save_pretrained(folder, max_shard_size="100KB" if model_type == "qwen3_5" else "1GB")
    for file in DEFAULT_MODEL.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    add_head(folder, sizes, model_type == "qwen3_5_moe")
    return folder


def fuse_experts(weights: dict[str, torch.Tensor], name: str, count: int) -> None:
    """Experts as Qwen3.5 publishes them: all in two tensors."""
    parts = {part: [weights.pop(f"{name}.{i}.{part}_proj.weight") for i in range(count)] for part in ("gate", "up")}
    weights[f"{name}.gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], dim=1)
    weights[f"{name}.down_proj"] = torch.stack([weights.pop(f"{name}.{i}.down_proj.weight") for i in range(count)])


def add_head(folder: Path, sizes: dict, is_fused: bool) -> None:
    """Write the head's weights, under their published names, into a file of the checkpoint."""
    hidden, inner, head_dim = sizes["hidden_size"], sizes.get("intermediate_size", 0), sizes["head_dim"]
    q, kv = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,), "self_attn.q_proj": (2 * q, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
    }  # fmt: skip
    mlps = {"mlp": inner}
    if count := sizes.get("num_experts", 0):
        mlps = {"mlp.shared_expert": sizes["shared_expert_intermediate_size"]}
        mlps |= {f"mlp.experts.{i}": sizes["moe_intermediate_size"] for i in range(count)}
        layer |= {"mlp.gate": (count, hidden), "mlp.shared_expert_gate": (1, hidden)}
    for name, width in mlps.items():
        layer |= {f"{name}.{part}_proj": (width, hidden) for part in ("gate", "up")}
        layer[f"{name}.down_proj"] = (hidden, width)
    shapes = {"fc": (hidden, 2 * hidden), "norm": (hidden,)}
    shapes |= {f"pre_fc_norm_{part}": (hidden,) for part in ("embedding", "hidden")}
    shapes |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    head = {f"mtp.{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    head["mtp.fc.weight"][:, :hidden] += 8 * torch.eye(hidden)  # with tied weights: the token again, as the target says
    if is_fused:
        fuse_experts(head, "mtp.layers.0.mlp.experts", count)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        save_file(head, folder / "mtp.safetensors")
        parsed = json.loads(index.read_text())
        parsed["weight_map"] |= dict.fromkeys(head, "mtp.safetensors")
        index.write_text(json.dumps(parsed))
        return
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors", metadata={"format": "pt"})


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module", params=SMALL)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / request.param, **SMALL[request.param])


@pytest.fixture(scope="module")
def model(folder: Path) -> HybridModel:
    return load_model(folder, torch.float32, show_progress=False)


@pytest.fixture(scope="module")
def oracle(folder: Path):
    model_class = CLASSES[json.loads((folder / "config.json").read_text())["model_type"]][1]
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def test_alone(model, oracle) -> None:
    check_alone(model, oracle)


def test_bfloat16(folder: Path, oracle) -> None:
    check_bfloat16(folder, oracle)


def test_served(folder: Path, oracle) -> None:
    check_served(folder, oracle, "mtp")
    if oracle.config.tie_word_embeddings:  # whose texts repeat themselves
        check_served(folder, oracle, "ngram")


def test_a_16_bit_state_is_rounded_after_every_token(model) -> None:
    token_ids = random_ids(model, 30)
    whole = run_whole(model, token_ids, torch.bfloat16)
    assert not torch.equal(whole, run_whole(model, token_ids))
    memory = Memory(model, "SD", torch.bfloat16)
    text = memory.text(token_ids)
    pieces = []
    for stop in (1, 9, 10, 30):
        pieces.append(run(model, memory, [text], [token_ids[text.num_computed : stop]]))
        text.num_computed = stop
    assert torch.equal(torch.cat(pieces), whole)


def plain_head(folder: Path, model: Qwen3Next, prev_hidden: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """The head as it is published, over slots 1 .. T of a text: hidden states [T, hidden]."""
    weights = weights_of(folder)
    embedding = next(tensor for name, tensor in weights.items() if name.endswith("embed_tokens.weight"))
    config, positions = model.config, torch.arange(1, len(token_ids) + 1)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"mtp.{name}.weight"].t()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + weights[f"mtp.{name}.weight"], config.rms_norm_eps)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        width = config.head_dim // 4
        angles = positions[:, None] / config.rotary.theta ** (torch.arange(0, width, 2) / width)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high, rest = x.split([width // 2, width // 2, config.head_dim - width], dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)

    inputs = [norm(embedding[token_ids], "pre_fc_norm_embedding"), norm(prev_hidden, "pre_fc_norm_hidden")]
    x = linear(torch.cat(inputs, dim=-1), "fc")
    y, name = norm(x, "layers.0.input_layernorm"), "layers.0.self_attn"
    query, gate = linear(y, f"{name}.q_proj").unflatten(1, (-1, 2 * config.head_dim)).chunk(2, dim=-1)
    key, value = (linear(y, f"{name}.{part}_proj").unflatten(1, (-1, config.head_dim)) for part in "kv")
    query, key = rotate(norm(query, f"{name}.q_norm")), rotate(norm(key, f"{name}.k_norm"))
    query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    y = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=True)[0]
    x = x + linear((y.transpose(0, 1) * gate.sigmoid()).flatten(1), f"{name}.o_proj")
    y, name = norm(x, "layers.0.post_attention_layernorm"), "layers.0.mlp"

    def mlp(y: torch.Tensor, name: str) -> torch.Tensor:
        return linear(F.silu(linear(y, f"{name}.gate_proj")) * linear(y, f"{name}.up_proj"), f"{name}.down_proj")

    def expert(y: torch.Tensor, i: int) -> torch.Tensor:
        if f"mtp.{name}.experts.gate_up_proj" not in weights:
            return mlp(y, f"{name}.experts.{i}")
        gate, up = (y @ weights[f"mtp.{name}.experts.gate_up_proj"][i].t()).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ weights[f"mtp.{name}.experts.down_proj"][i].t()

    if not config.num_experts:
        return norm(x + mlp(y, name), "norm")
    scores, ids = linear(y, f"{name}.gate").softmax(-1).topk(config.num_experts_per_tok, dim=-1)
    scores = scores / scores.sum(-1, keepdim=True) if config.norm_topk_prob else scores
    mixed = linear(y, f"{name}.shared_expert_gate").sigmoid() * mlp(y, f"{name}.shared_expert")
    for i in range(config.num_experts):
        mixed += (scores * (ids == i)).sum(-1, keepdim=True) * expert(y, i)
    return norm(x + mixed, "norm")


@torch.inference_mode()
def test_the_head_is_the_published_one_in_any_pieces_and_on_its_own_drafts(model, folder: Path) -> None:
    hidden, token_ids = check_head_pieces(model), random_ids(model, 60)
    prev_hidden, memory = run_whole(model, token_ids)[:-1], Memory(model, "SD")
    text, slots = memory.text(token_ids + [0] * 3), prev_hidden
    text.num_computed = 1
    assert torch.equal(run_head(model, memory, text, prev_hidden, token_ids[1:]), hidden)
    for position in range(60, 63):
        theirs = plain_head(folder, model, slots, token_ids[1:])
        torch.testing.assert_close(hidden, theirs[-len(hidden) :], **tolerance("kernel", torch.float32))
        draft = int(model.mtp_logits(hidden)[-1].argmax())
        assert draft == int(model.compute_logits(theirs)[-1].argmax())
        token_ids, slots = [*token_ids, draft], torch.cat([slots, theirs[-1:]])
        text.num_computed = position
        hidden = run_head(model, memory, text, hidden[-1:], [draft])


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return build(tmp_path / "model", **SMALL["text"])


def test_layer_types_by_interval_and_old_rotary_fields(small: Path) -> None:
    parsed = load_model(small, torch.float32, show_progress=False).config
    edit_config(
        small, layer_types=None, full_attention_interval=2, rope_parameters=None, rope_theta=1e4,
        partial_rotary_factor=0.25,
    )  # fmt: skip
    assert load_model(small, torch.float32, show_progress=False).config == parsed


def test_a_head_that_the_checkpoint_lacks_is_none(small: Path) -> None:
    weights = load_file(small / "model.safetensors")
    save_file({n: t for n, t in weights.items() if not n.startswith("mtp.")}, small / "model.safetensors")
    model = load_model(small, torch.float32, show_progress=False)
    assert not model.has_mtp
    assert [spec.kind for spec in model.state_specs()] == ["conv", "temporal"] * 2
    assert len(model.attention_specs()) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["sliding_attention"]}, "layer_types with sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; served: silu"),
        ({"attention_bias": True}, "attention_bias = True; served: False"),
        ({"mtp_num_hidden_layers": 2}, "2 MTP layers; served: at most 1"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True; served: False"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
        ({"linear_num_value_heads": 7}, "linear_num_value_heads = 7; served: multiples of linear_num_key_heads"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(small: Path, changes: dict, text: str) -> None:
    edit_config(small, **changes)
    with pytest.raises(CheckpointError, match=text):
        load_model(small, torch.float32, show_progress=False)
