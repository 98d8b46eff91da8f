"""Nemotron-H: logits against transformers, and the same bits however a text is cut, batched, drafted or laid out."""

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig, NemotronHForCausalLM

import mambalign.engine
from mambalign.kernels.tolerances import tolerance
from mambalign.worker.batch import ScheduledRow
from mambalign.worker.forward_batch import ForwardBatch, StepRows, forward_batch, lay_out
from mambalign.worker.mamba_columns import NULL_BLOCK
from mambalign.worker.models.loader import CheckpointError
from mambalign.worker.models.nemotron_h import NemotronH
from mambalign.worker.models.registry import load_model
from mambalign.worker.state_cache import StateCache

DEFAULT_MODEL = Path(mambalign.engine.__file__).parent / "default_model"
MAX_DRAFTS = 7
KV_BLOCK_TOKENS = 16

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


@dataclass
class Text:
    """A sequence that is run piece by piece: its tokens, its blocks, and how far it is."""

    token_ids: list[int]
    kv_blocks: list[int]
    state_blocks: list[int]
    num_computed: int = 0
    num_accepted: int = 1
    is_decoding: bool = False
    hidden: list[torch.Tensor] = field(default_factory=list)  # of the tokens that are final


class Memory:
    """A poisoned cache and its free blocks."""

    def __init__(self, model: NemotronH, layout: str, temporal_dtype: torch.dtype = torch.float32, seed: int = 0):
        self.cache = StateCache.allocate(
            model.attention_specs(), model.state_specs(temporal_dtype), num_kv_blocks=128, num_mamba_blocks=96,
            kv_block_tokens=KV_BLOCK_TOKENS, mamba_block_tokens=4096, conv_layout=layout,
            conv_width=model.conv_width, num_spec_tokens=MAX_DRAFTS, fill=float("nan"),
        )  # fmt: skip
        self.free = {"kv": list(range(1, 128)), "state": list(range(1, 96))}
        for blocks in self.free.values():
            random.Random(seed).shuffle(blocks)

    def text(self, token_ids: list[int]) -> Text:
        num_kv_blocks = -(-(len(token_ids) + MAX_DRAFTS) // KV_BLOCK_TOKENS)
        return Text(token_ids, self._take("kv", num_kv_blocks), self._take("state", 1 + MAX_DRAFTS))

    def _take(self, pool: str, count: int) -> list[int]:
        taken, self.free[pool] = self.free[pool][:count], self.free[pool][count:]
        return taken

    def null_blocks_untouched(self) -> bool:
        tensors = [*self.cache.keys, *self.cache.values, *self.cache.conv, *self.cache.temporal]
        return all(tensor[NULL_BLOCK].isnan().all() for tensor in tensors)


def step_batch(memory: Memory, texts: list[Text], inputs: list[list[int]], boundaries=()) -> ForwardBatch:
    """One pass over `inputs` of each text. boundaries: (text, number of its inputs, block that keeps the state)."""
    scheduled = [
        ScheduledRow("", 0, text.num_computed, ids, text.is_decoding, text.kv_blocks, {}, [], None)
        for text, ids in zip(texts, inputs, strict=True)
    ]
    layout = lay_out(scheduled, memory.cache, resumed=set())
    for i, num_tokens, block in boundaries:
        layout.boundary_block[layout.query_start[i] + num_tokens - 1] = block
    width = max(len(text.state_blocks) for text in texts)
    table = [text.state_blocks + [NULL_BLOCK] * (width - len(text.state_blocks)) for text in texts]
    numbers = [[text.num_computed for text in texts], [0] * len(texts), [text.num_accepted for text in texts], table]
    tensors = (torch.tensor(values, dtype=torch.int32) for values in numbers)
    return forward_batch(StepRows(layout, *tensors, layout.token_ids), memory.cache)


def run(model: NemotronH, memory: Memory, texts: list[Text], inputs: list[list[int]], boundaries=()) -> torch.Tensor:
    """Run `step_batch`. Returns hidden states [T, hidden]."""
    with torch.inference_mode():
        return model.forward(step_batch(memory, texts, inputs, boundaries), memory.cache)


def run_head(
    model: NemotronH, memory: Memory, text: Text, prev_hidden: torch.Tensor, token_ids: list[int]
) -> torch.Tensor:
    """The MTP head over `token_ids` from where the text is. Returns [T, hidden]."""
    batch = step_batch(memory, [text], [token_ids])
    attention = replace(batch.attention, first_key=1)
    return model.mtp_forward(prev_hidden, batch.token_ids, batch.positions, batch.slot_mapping, attention, memory.cache)


def run_whole(model: NemotronH, token_ids: list[int], temporal_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    memory = Memory(model, "SD", temporal_dtype)
    return run(model, memory, [memory.text(token_ids)], [token_ids])


def random_ids(model: NemotronH, count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, model.vocab_size) for _ in range(count)]


def assert_logits_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, theirs / scale, **tolerance("logits", torch.float32))


@torch.inference_mode()
def test_logits_of_prefill_chunks_and_decode_are_those_of_transformers(model, oracle) -> None:
    token_ids = random_ids(model, 150)
    theirs = oracle(torch.tensor([token_ids])).logits[0]
    assert_logits_close(model.compute_logits(run_whole(model, token_ids)), theirs)

    memory = Memory(model, "SD")
    text = memory.text(token_ids)
    hidden = []
    for stop in (1, 64, 127, 140, *range(141, 151)):
        text.is_decoding = stop > 140
        hidden.append(run(model, memory, [text], [token_ids[text.num_computed : stop]]))
        text.num_computed = stop
    assert_logits_close(model.compute_logits(torch.cat(hidden)), theirs)


def advance(text: Text, source: random.Random, vocab_size: int) -> tuple[list[int], int]:
    """Inputs of the text's next step, and how many of them will be final: a piece of prompt, or a token and drafts."""
    rest = text.token_ids[text.num_computed :]
    if not text.is_decoding:
        piece = source.choice((1, 2, 3, 5, 17, 40, len(rest)))
        return rest[:piece], min(piece, len(rest))
    num_drafts = min(source.randint(0, MAX_DRAFTS), len(rest) - 1)
    num_right = source.randint(0, num_drafts)
    drafts = rest[1 : 1 + num_right] + [source.randrange(vocab_size) for _ in range(num_drafts - num_right)]
    return rest[:1] + drafts, 1 + num_right


def check_random_schedule(model: NemotronH, layout: str, seed: int, lengths: list[int]) -> None:
    """Run several texts side by side, in random pieces and with random drafts; every final hidden state is exact."""
    source = random.Random(seed)
    memory = Memory(model, layout, seed=seed)
    texts = [memory.text(random_ids(model, length, seed=length)) for length in lengths]
    prompts = [source.randint(1, length) for length in lengths]
    while waiting := [text for text in texts if text.num_computed < len(text.token_ids)]:
        chosen = source.sample(waiting, source.randint(1, len(waiting)))
        for text in chosen:
            text.is_decoding = text.num_computed >= prompts[texts.index(text)]
        steps = [advance(text, source, model.vocab_size) for text in chosen]
        inputs, kept = zip(*steps, strict=True)
        hidden = run(model, memory, chosen, list(inputs)).split([len(ids) for ids in inputs])
        for text, num_final, row in zip(chosen, kept, hidden, strict=True):
            text.hidden.append(row[:num_final])
            text.num_computed += num_final
            text.num_accepted = num_final if text.is_decoding else 1
    for text in texts:
        assert torch.equal(torch.cat(text.hidden), run_whole(model, text.token_ids)), (
            layout,
            seed,
            len(text.token_ids),
        )
    assert memory.null_blocks_untouched()


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_bits_do_not_depend_on_pieces_batch_or_drafts(model, layout: str) -> None:
    for seed in range(3):
        check_random_schedule(model, layout, seed, lengths=[1, 2, 3, 63, 100, 128, 129, 150])


def test_bits_with_many_rows(model) -> None:
    check_random_schedule(model, "SD", seed=7, lengths=[9, 10, 11, 12, 13, 14, 15, 16, 17, 40, 41])


def test_every_cut_of_a_prompt_gives_the_same_bits(model) -> None:
    token_ids = random_ids(model, 20)
    whole = run_whole(model, token_ids)
    for cut in range(1, 20):
        memory = Memory(model, "DS", seed=cut)
        text = memory.text(token_ids)
        first = run(model, memory, [text], [token_ids[:cut]])
        text.num_computed = cut
        assert torch.equal(torch.cat([first, run(model, memory, [text], [token_ids[cut:]])]), whole)


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_a_boundary_state_is_the_state_after_exactly_its_tokens(model, layout: str) -> None:
    token_ids = random_ids(model, 40)
    whole = run_whole(model, token_ids)
    memory = Memory(model, layout)
    text = memory.text(token_ids)
    run(model, memory, [text], [token_ids[:10]])
    text.num_computed = 10
    at = {1: 61, 2: 62, 3: 63, 17: 64, 30: 65}  # tokens of the second piece -> block
    run(model, memory, [text], [token_ids[10:]], [(0, m, block) for m, block in at.items()])
    for m, block in at.items():
        text.num_computed, text.state_blocks = 10 + m, [block]
        if text.num_computed < len(token_ids):
            rest = run(model, memory, [text], [token_ids[10 + m :]])
            assert torch.equal(rest, whole[10 + m :])


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


@torch.inference_mode()
def test_the_mtp_head_gives_the_same_bits_in_any_pieces(model) -> None:
    token_ids = random_ids(model, 60)
    prev_hidden = run_whole(model, token_ids)[:-1]
    outputs = []
    for pieces in ([59], [1, 1, 2, 3, 30, 22]):
        memory = Memory(model, "SD")
        text = memory.text(token_ids)
        text.num_computed, hidden = 1, []
        for piece in pieces:
            start, stop = text.num_computed, text.num_computed + piece
            hidden.append(run_head(model, memory, text, prev_hidden[start - 1 : stop - 1], token_ids[start:stop]))
            text.num_computed = stop
        outputs.append(torch.cat(hidden))
    assert not outputs[0].isnan().any()
    assert torch.equal(*outputs)


def test_bfloat16_runs_and_is_close(folder: Path, oracle) -> None:
    model = load_model(folder, torch.bfloat16, show_progress=False)
    token_ids = random_ids(model, 50)
    hidden = run_whole(model, token_ids)
    with torch.inference_mode():
        ours, theirs = model.compute_logits(hidden), oracle(torch.tensor([token_ids])).logits[0]
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, theirs / scale, **tolerance("logits", torch.bfloat16))
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
