"""Options: each wrong value is refused with a text that names it; auto values resolve as documented."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mambalign.engine.checkpoint import DEFAULT_MODEL, CheckpointFacts, load_tokenizer, locate, read_facts
from mambalign.engine.cli import make_parser, parse
from mambalign.engine.config import EngineConfig, ServerConfig
from mambalign.engine.option import ConfigError, check_values, parse_bytes
from mambalign.engine.resolution import check_chunks, resolve

FACTS = CheckpointFacts(
    name="tiny",
    path=Path("/nowhere"),
    is_default=False,
    max_model_len=4096,
    dtype="bfloat16",
    vocab_size=256,
    num_mtp_layers=1,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("123", 123), ("512MiB", 512 << 20), ("4G", 4 << 30), ("1.5gib", 3 << 29), ("2 GB", 2 * 10**9)],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "4XB", "-1", "1e9", "4 GiB extra"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spec_token": 3}, "unknown option.*spec_token"),
        ({"spec_tokens": 9}, "--spec-tokens 9.*at most 8"),
        ({"spec_tokens": -1}, "--spec-tokens -1.*at least 0"),
        ({"spec_tokens": True}, "--spec-tokens True.*must be int"),
        ({"spec_tokens": "3"}, "--spec-tokens '3'.*must be int"),
        ({"enable_prefix_caching": 1}, "--enable-prefix-caching 1.*must be bool"),
        ({"mamba_cache_mode": "all"}, "--mamba-cache-mode all.*use align"),
        ({"runner": "v3"}, "--runner .v3..*v1, v2"),
        ({"mamba_cache_mode": "some"}, "--mamba-cache-mode 'some'.*none, align$"),
        ({"mamba_cache_mode": "none", "enable_prefix_caching": True}, "needs --mamba-cache-mode align"),
        ({"mamba_cache_mode": "none", "check_fused_copy": True}, "needs --mamba-cache-mode align"),
        ({"mamba_block_size": 100}, "--mamba-block-size 100.*multiple of --kv-block-size.*16"),
        ({"mamba_block_size": 7, "kv_block_size": 1, "spec_tokens": 7}, "at least 8, not 7"),
        ({"max_num_batched_tokens": 3, "spec_tokens": 3}, "--max-num-batched-tokens 3.*at least 4"),
        ({"mamba_cache_fraction": 1.0}, "--mamba-cache-fraction 1.0.*between 0 and 1"),
        ({"mamba_cache_fraction": 0}, "--mamba-cache-fraction 0.*between 0 and 1"),
        ({"cache_memory": "lots"}, "'lots' is not a number of bytes"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization 0.0.*at least 0.05"),
        ({"spec_acceptance": 2.4, "spec_tokens": 1}, "--spec-acceptance 2.4.*at most 2 with --spec-tokens 1"),
        ({"draft_head_dtype": "int8"}, "--draft-head-dtype 'int8'.*auto, fp8, model$"),
        ({"cache_memory": 0}, "--cache-memory 0.*at least 1"),
        ({"max_model_len": 1}, "--max-model-len 1.*at least 2"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0.*at least 1"),
        ({"check_fused_copy_rate": float("nan")}, "--check-fused-copy-rate nan: must be a finite number"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization nan: must be a finite number"),
        ({"model": ""}, "--model: must not be empty"),
    ],
)
def test_refused_before_any_checkpoint_is_read(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_options(**options)


def test_block_of_exactly_one_step_is_served() -> None:
    EngineConfig.from_options(mamba_block_size=8, kv_block_size=8, spec_tokens=7, max_num_batched_tokens=8)


@pytest.mark.parametrize("chunk_tokens", [32, 64])
def test_chunks_of_a_prompt_fit_a_step_and_a_block(chunk_tokens: int) -> None:
    fitting = {"mamba_block_size": chunk_tokens, "max_num_batched_tokens": chunk_tokens, "kv_block_size": 8}
    check_chunks(EngineConfig.from_options(**fitting), chunk_tokens)
    without_cache = {"mamba_cache_mode": "none", "mamba_block_size": 8}
    check_chunks(EngineConfig.from_options(**fitting | without_cache), chunk_tokens)
    for wrong in ({"mamba_block_size": chunk_tokens + 8}, {"max_num_batched_tokens": chunk_tokens - 1}):
        (name, value), words = next(iter(wrong.items())), "multiple of" if "mamba_block_size" in wrong else "at least"
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {value}.*{words} {chunk_tokens}"):
            check_chunks(EngineConfig.from_options(**fitting | wrong), chunk_tokens)


def test_a_model_without_a_scan_has_no_chunks() -> None:
    with pytest.raises(ConfigError, match="--prefill-scan chunked: no layer of this model has a scan"):
        check_chunks(EngineConfig.from_options(prefill_scan="chunked"), None)


def test_server_options_are_checked_too() -> None:
    times = [ServerConfig(request_timeout=float("nan")), ServerConfig(read_timeout=float("inf"))]
    for part in (ServerConfig(port=65536), ServerConfig(host=""), ServerConfig(api_key=""), *times):
        with pytest.raises(ConfigError):
            check_values(part)


def resolved(facts: CheckpointFacts = FACTS, cuda: tuple[int, int] | None = None, **options: object) -> EngineConfig:
    config = EngineConfig.from_options(**options)
    return resolve(config, facts, cuda_capability=cuda)


def test_resolve_on_cpu() -> None:
    config = resolved(spec_tokens=2)
    assert (config.model.device, config.model.dtype, config.model.max_model_len) == ("cpu", "float32", 4096)
    assert (config.cache.cache_memory, config.cache.enable_prefix_caching) == (1 << 30, True)
    assert (config.spec.spec_tokens, config.spec.spec_method) == (2, "mtp")


def test_resolve_on_cuda() -> None:
    config = resolved(cuda=(9, 0), mamba_cache_mode="none")
    assert (config.model.device, config.model.dtype) == ("cuda", "bfloat16")
    assert config.cache.cache_memory is None  # known when the weights are loaded
    assert config.cache.enable_prefix_caching is False


def test_resolve_drafts() -> None:
    default, headless = replace(FACTS, is_default=True), replace(FACTS, num_mtp_layers=0)
    assert resolved().spec.spec_tokens == 0 and resolved().spec.spec_method is None
    assert resolved(default).spec.spec_tokens == 3
    assert resolved(default, mamba_block_size=2, kv_block_size=2).spec.spec_tokens == 1
    assert resolved(headless, spec_tokens=1).spec.spec_method == "ngram"
    assert resolved(spec_tokens=1, spec_method="ngram").spec.spec_method == "ngram"
    with pytest.raises(ConfigError, match="no MTP head"):
        resolved(headless, spec_tokens=1, spec_method="mtp")


def test_resolve_where_drafts_are_taken_from() -> None:
    drafts, headless = {"spec_tokens": 1}, replace(FACTS, num_mtp_layers=0)
    for cuda, wanted in (((9, 0), "fp8"), ((8, 9), "fp8"), ((8, 6), "model"), (None, "model")):
        assert resolved(cuda=cuda, **drafts).spec.draft_head_dtype == wanted
    assert resolved(cuda=(9, 0), draft_head_dtype="fp8", **drafts).spec.draft_head_dtype == "fp8"
    assert resolved(cuda=(9, 0), draft_head_dtype="model", **drafts).spec.draft_head_dtype == "model"
    assert resolved(cuda=(9, 0), device="cpu", **drafts).spec.draft_head_dtype == "model"
    assert resolved(cuda=(9, 0)).spec.draft_head_dtype == "model"  # no drafts
    assert resolved(headless, cuda=(9, 0), **drafts).spec.draft_head_dtype == "model"
    for cuda, device in ((None, "auto"), ((8, 6), "auto"), ((9, 0), "cpu")):
        with pytest.raises(ConfigError, match=r"--draft-head-dtype fp8: needs --device cuda.*8\.9.*use .* model"):
            resolved(cuda=cuda, device=device, draft_head_dtype="fp8", **drafts)
    with pytest.raises(ConfigError, match="--draft-head-dtype fp8: drafts by ngram"):
        resolved(cuda=(9, 0), spec_method="ngram", draft_head_dtype="fp8", **drafts)


def test_resolve_refuses() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 4097: at most 4096"):
        resolved(max_model_len=4097)
    with pytest.raises(ConfigError, match="--device cuda"):
        resolved(device="cuda")


def test_missing_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        locate(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_facts(str(tmp_path), locate(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        read_facts(str(tmp_path), tmp_path)


def test_a_missing_tokenizer_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"cannot load its tokenizer \(") as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_tokenizer_has_no_opinion_on_lengths() -> None:
    tokenizer = load_tokenizer(DEFAULT_MODEL)
    assert len(tokenizer.encode("a b" * 3000)) > 4096
    assert not tokenizer.deprecation_warnings, "where transformers notes that it has written one into the log"


def test_facts_of_a_nested_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"torch_dtype": "bfloat16", "text_config": {"vocab_size": 8, "max_position_embeddings": 64, '
        '"mtp_num_hidden_layers": 1}}'
    )
    facts = read_facts(str(tmp_path), tmp_path)
    assert (facts.name, facts.max_model_len, facts.vocab_size) == (tmp_path.name, 64, 8)
    assert (facts.dtype, facts.num_mtp_layers, facts.is_default) == ("bfloat16", 1, False)


@pytest.mark.parametrize(
    ("model_type", "said", "names", "num_layers"),
    [
        ("qwen3_next", None, ["model.norm.weight", "mtp.layers.0.norm.weight", "mtp.fc.weight"], 1),
        ("qwen3_5_text", 0, ["mtp.layers.0.norm.weight"], 0),
        ("nemotron_h", 2, ["mtp.layers.0.norm.weight"], 2),
        ("nemotron_h", 1, ["language_model.mtp.layers.0.norm.weight"], 1),
        ("nemotron_h", 1, ["model.norm.weight"], 0),
        ("nemotron_h", None, ["mtp.layers.0.norm.weight"], 0),
        ("nemotron_h", 1, [], 1),
        ("nemotron_h", None, [], 0),
    ],
)
def test_the_names_of_the_weights_tell_whether_there_is_a_head(
    tmp_path: Path, model_type: str, said: int | None, names: list[str], num_layers: int
) -> None:
    field = "mtp_num_hidden_layers" if model_type == "qwen3_5_text" else "num_nextn_predict_layers"
    config = {"model_type": model_type, "vocab_size": 8, "max_position_embeddings": 64, field: said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if names:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "a")}))
    assert read_facts(str(tmp_path), tmp_path).num_mtp_layers == num_layers
    if names:
        (tmp_path / "model.safetensors.index.json").unlink()
        header = json.dumps({"__metadata__": {}} | {name: {} for name in names}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert read_facts(str(tmp_path), tmp_path).num_mtp_layers == num_layers


@pytest.mark.parametrize("option", ["--spec-acceptance=2.0", "--load-format=dummy"])
def test_serve_has_no_options_for_benchmarks(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(make_parser("serve"), [option])
    assert left.value.code == 2 and "unknown argument" in capsys.readouterr().err
