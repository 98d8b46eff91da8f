"""Every option of the engine, one frozen dataclass per owner.

The CLI and `LLM(**options)` are generated from these. A field's metadata holds its help text (with units)
and its limits; its default is the CLI's default. `validate` refuses what no checkpoint could serve; `resolve`
fills in "auto" and None from the checkpoint's facts and refuses what this checkpoint cannot serve. Both are
pure and run before any weight is loaded. Nothing here imports torch.
"""

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

from mambalign.kernels.chunk_shape import DELTA_CHUNK, MAMBA2_CHUNK

MAX_SPEC_TOKENS = 8
DEFAULT_MODEL_SPEC_TOKENS = 3
DEFAULT_CPU_CACHE_BYTES = 1 << 30
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


class ConfigError(ValueError):
    """Options that cannot be served, alone or together. The text names the option and the limit."""


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A field. metadata: `choices`, `refused` of them, `low`, `high` (inclusive), `bytes`, `positional`,
    `bench_only` (no option of `serve`)."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class ModelConfig:
    model: str | None = option(
        None, "checkpoint folder or hub id (default: the small model that ships)", positional=True
    )
    dtype: str = option(
        "auto",
        "weights and activations (auto: float32 on CPU, the checkpoint's on CUDA)",
        choices=("auto", "float32", "bfloat16"),
    )
    device: str = option("auto", "device to run on (auto: cuda if there is one)", choices=("auto", "cpu", "cuda"))
    load_format: str = option(
        "auto", "auto: the checkpoint's weights; dummy: random ones", choices=("auto", "dummy"), bench_only=True
    )
    max_model_len: int | None = option(None, "longest prompt + output, tokens (default: the checkpoint's)", low=2)
    seed: int = option(0, "where the seeds of requests that bring none start", low=0, high=2**63 - 1)


@dataclass(frozen=True)
class CacheConfig:
    mamba_cache_mode: str = option(
        "align",
        "align: keep states at multiples of the block size; none: keep no state but the running one",
        choices=("none", "align", "all"),
        refused={"all": "it keeps a state for every token; use align, which keeps those at block boundaries"},
    )
    mamba_block_size: int = option(
        128, "tokens per recurrent-state block, a multiple of --kv-block-size", low=1, high=65536
    )
    mamba_conv_layout: str = option(
        "SD", "conv states stored [state_len, dim] or [dim, state_len]", choices=("SD", "DS")
    )
    mamba_ssm_cache_dtype: str = option("float32", "temporal states", choices=("float32", "bfloat16", "float16"))
    kv_block_size: int = option(16, "tokens per KV block", low=1, high=1024)
    cache_memory: int | None = option(
        None,
        "both caches together, bytes or like 512MiB, 4GiB (default: 1GiB on CPU, what --gpu-memory-utilization "
        "leaves on CUDA)",
        bytes=True,
        low=1,
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the device memory for weights, activations and caches (CUDA)", low=0.05, high=1.0
    )
    mamba_cache_fraction: float | None = option(
        None,
        "share of --cache-memory for states, between 0 and 1 (default: what the running requests need first)",
    )
    enable_prefix_caching: bool | None = option(
        None, "look up and publish prefixes (default: yes with --mamba-cache-mode align)"
    )


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = option(16, "requests that run at once", low=1, high=4096)
    max_num_batched_tokens: int = option(2048, "tokens a step, prompts and drafts together", low=1, high=1 << 20)


@dataclass(frozen=True)
class SpecConfig:
    spec_tokens: int | None = option(
        None,
        "draft tokens a step, 0 to 8 (default: 0, and 3 for the model that ships)",
        low=0,
        high=MAX_SPEC_TOKENS,
    )
    spec_method: str | None = option(
        None,
        "where drafts come from (default: mtp if the checkpoint has a head, else ngram)",
        choices=("mtp", "ngram"),
    )
    spec_acceptance: float | None = option(
        None,
        "keep this many tokens a step on average whatever they are: for benchmarks, the text is then meaningless",
        low=1.0,
        high=MAX_SPEC_TOKENS + 1,
        bench_only=True,
    )


@dataclass(frozen=True)
class RunnerConfig:
    runner: str = option(
        "v2", "model runner: v2 launches a step ahead of the results, v1 waits for each", choices=("v1", "v2")
    )
    prefill_scan: str = option(
        "recurrent",
        f"recurrent layers over a prompt; recurrent: a token at a time, as in a reply; chunked: {MAMBA2_CHUNK} at a "
        f"time in Mamba-2, {DELTA_CHUNK} in the gated delta rule, faster on CUDA for long prompts, with other bits: "
        "the prefix cache then keeps prompts and no replies, so the next turn of a chat hits up to the last prompt",
        choices=("recurrent", "chunked"),
    )
    enforce_eager: bool = option(False, "launch each kernel of a step by itself, without CUDA graphs (CUDA)")
    check_fused_copy: bool = option(False, "compare copies of states with the scalar path, and fail loudly")
    check_fused_copy_rate: float = option(
        1.0, "share of the steps that --check-fused-copy checks, 0 to 1", low=0.0, high=1.0
    )


@dataclass(frozen=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on (0: any free one, printed at start)", low=0, high=65535)
    served_model_name: str | None = option(None, "name in the API (default: the hub id, or the folder's name)")
    chat_template: str | None = option(None, "jinja file, or the template itself (default: the checkpoint's)")
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls (auto: as its chat template says)",
        choices=("auto", "hermes", "qwen3_coder", "nemotron_json", "none"),
    )
    reasoning_parser: str = option(
        "auto",
        "take <think>...</think> out of the replies, as reasoning_content (auto: if the chat template has such tags)",
        choices=("auto", "think", "none"),
    )
    api_key: str | None = option(
        None, "require one of these bearer tokens, separated by commas (also from MAMBALIGN_API_KEY; default: none)"
    )
    api_key_file: str | None = option(None, "file with more such tokens, one a line")
    ssl_certfile: str | None = option(None, "serve HTTPS with this certificate chain, PEM")
    ssl_keyfile: str | None = option(None, "its private key, PEM (default: in --ssl-certfile)")
    cors_origins: str | None = option(
        None, "web origins whose pages may call this server, separated by commas; * for all (default: none)"
    )
    max_body_size: int = option(64 << 20, "largest body of a request, bytes or like 8MiB", bytes=True, low=1024)
    max_live_requests: int = option(
        1024, "texts in work at once, waiting or running, each choice counts; past it requests get a 429", low=1
    )
    request_timeout: float | None = option(
        None, "seconds after which a request that still runs is aborted (default: never)", low=0.001
    )
    read_timeout: float = option(
        30.0, "seconds in which a client has to send a request, or the next one on an open connection", low=0.001
    )
    engine_timeout: float = option(
        5.0, "seconds without a sign of life after which the requests of a stopped engine process fail", low=1.0
    )
    write_timeout: float = option(
        60.0, "seconds after which the request of a client that reads nothing of its answer is aborted", low=0.001
    )
    log_prompts: bool = option(False, "write prompts and answers into the access log")
    log_level: str = option("info", "least severe messages to print", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine process needs; `ServerConfig` stays on the API side."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Build from flat names (`spec_tokens=3`) and validate. Raises ConfigError."""
        parts: dict[str, Any] = {}
        for part in fields(cls):
            owner: Any = part.default_factory
            parts[part.name] = build_part(owner, options)
        if options:
            raise ConfigError(f"unknown option(s): {', '.join(sorted(options))}")
        config = cls(**parts)
        validate(config)
        return config


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint's own files say, as far as options depend on it."""

    name: str  # for people and the API: hub id or folder name
    path: Path  # local folder
    is_default: bool  # the small model that ships
    max_model_len: int  # tokens
    dtype: str  # of the stored weights: "float32", "bfloat16", "float16"
    vocab_size: int
    num_mtp_layers: int  # 0: no MTP head


def build_part(owner: Any, options: dict[str, Any]) -> Any:
    """Take one dataclass's fields out of flat `options` (which shrinks) and build it; "4GiB" is parsed."""
    values = {f.name: options.pop(f.name) for f in fields(owner) if f.name in options}
    for f in fields(owner):
        if f.metadata.get("bytes") and isinstance(values.get(f.name), str):
            values[f.name] = parse_bytes(values[f.name])
    return owner(**values)


def parse_bytes(text: str) -> int:
    """Bytes of "1000000", "512MiB", "1.5GiB", "4G" (= GiB), "2GB" (= 2 * 10**9). Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and {name.lower(): factor for name, factor in _UNITS.items()}.get(match[2].lower())
    if not match or unit is None:
        raise ConfigError(f"{text!r} is not a number of bytes: write 1000000, 512MiB or 4GiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def flag(name: str) -> str:
    """The CLI's spelling of an option: `spec_tokens` -> `--spec-tokens`."""
    return "--" + name.replace("_", "-")


def allowed_types(annotation: Any) -> tuple[type, ...]:
    """`int | None` -> (int, NoneType)."""
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def check_values(part: Any) -> None:
    """Check each field of one options dataclass by itself: type, choices, range. Raises ConfigError."""
    for f in fields(part):
        value, name = getattr(part, f.name), flag(f.name)
        types = allowed_types(f.type)
        if value is None and NoneType in types:
            continue
        wrong_bool = isinstance(value, bool) and bool not in types
        if wrong_bool or not isinstance(value, (*types, int) if float in types else types):
            wanted = " or ".join("None" if t is NoneType else t.__name__ for t in types)
            raise ConfigError(f"{name} {value!r}: must be {wanted}, not {type(value).__name__}")
        choices = f.metadata.get("choices")
        refused = f.metadata.get("refused", {})
        if value in refused:
            raise ConfigError(f"{name} {value} cannot be served: {refused[value]}")
        if choices and value not in choices:
            served = ", ".join(choice for choice in choices if choice not in refused)
            raise ConfigError(f"{name} {value!r}: must be one of {served}")
        low, high = f.metadata.get("low"), f.metadata.get("high")
        if low is not None and value < low:
            raise ConfigError(f"{name} {value}: must be at least {low}")
        if high is not None and value > high:
            raise ConfigError(f"{name} {value}: must be at most {high}")
        if value == "":
            raise ConfigError(f"{name}: must not be empty")


def validate(config: EngineConfig) -> None:
    """Refuse every value and combination that no checkpoint makes right. Raises ConfigError."""
    for part in fields(config):
        check_values(getattr(config, part.name))
    cache, spec_tokens = config.cache, config.spec.spec_tokens or 0
    if cache.mamba_block_size % cache.kv_block_size:
        raise ConfigError(
            f"--mamba-block-size {cache.mamba_block_size}: must be a multiple of --kv-block-size, "
            f"which is {cache.kv_block_size}"
        )
    if spec_tokens + 1 > cache.mamba_block_size:
        raise ConfigError(
            f"--spec-tokens {spec_tokens}: needs --mamba-block-size of at least {spec_tokens + 1}, not "
            f"{cache.mamba_block_size}: a step must not cross two block boundaries"
        )
    if spec_tokens + 1 > config.scheduler.max_num_batched_tokens:
        raise ConfigError(
            f"--max-num-batched-tokens {config.scheduler.max_num_batched_tokens}: must be at least "
            f"{spec_tokens + 1}: one token and --spec-tokens {spec_tokens} drafts"
        )
    acceptance = config.spec.spec_acceptance
    if acceptance is not None and acceptance > spec_tokens + 1:
        raise ConfigError(f"--spec-acceptance {acceptance}: at most {spec_tokens + 1} with --spec-tokens {spec_tokens}")
    if cache.mamba_cache_fraction is not None and not 0 < cache.mamba_cache_fraction < 1:
        raise ConfigError(f"--mamba-cache-fraction {cache.mamba_cache_fraction}: must lie between 0 and 1")
    if cache.mamba_cache_mode == "none":
        if cache.enable_prefix_caching:
            raise ConfigError("--enable-prefix-caching needs --mamba-cache-mode align: mode none keeps no state")
        if config.runner.check_fused_copy:
            raise ConfigError("--check-fused-copy needs --mamba-cache-mode align: mode none copies no state")


def check_checkpoint(config: EngineConfig, facts: CheckpointFacts) -> None:
    """Refuse options that this checkpoint cannot serve. Raises ConfigError."""
    limit = facts.max_model_len
    if config.model.max_model_len is not None and config.model.max_model_len > limit:
        raise ConfigError(f"--max-model-len {config.model.max_model_len}: at most {limit} for {facts.name}")
    if config.spec.spec_method == "mtp" and config.spec.spec_tokens != 0 and not facts.num_mtp_layers:
        raise ConfigError(f"--spec-method mtp: {facts.name} has no MTP head; use --spec-method ngram")


def check_chunks(config: EngineConfig, chunk_tokens: int | None) -> None:
    """Refuse options under which prompts cannot run by chunks of so many tokens; None: by none. Raises ConfigError."""
    if chunk_tokens is None:
        raise ConfigError("--prefill-scan chunked: no layer of this model has a scan; use --prefill-scan recurrent")
    block_tokens, budget = config.cache.mamba_block_size, config.scheduler.max_num_batched_tokens
    if config.cache.mamba_cache_mode == "align" and block_tokens % chunk_tokens:
        raise ConfigError(
            f"--mamba-block-size {block_tokens}: must be a multiple of {chunk_tokens} with --prefill-scan chunked for "
            "this model: states are known at the ends of chunks"
        )
    if budget < chunk_tokens:
        raise ConfigError(
            f"--max-num-batched-tokens {budget}: must be at least {chunk_tokens} with --prefill-scan chunked for this "
            "model: a chunk runs in one step"
        )


def resolve(config: EngineConfig, facts: CheckpointFacts, *, cuda_available: bool) -> EngineConfig:
    """Fill in every "auto" and None but `mamba_cache_fraction` and, on CUDA, `cache_memory`. Raises ConfigError.

    Those two are known when the weights are loaded. With `--spec-tokens 0` the method is None.
    """
    validate(config)
    check_checkpoint(config, facts)
    device = config.model.device
    if device == "cuda" and not cuda_available:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if device == "auto":
        device = "cuda" if cuda_available else "cpu"
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" or facts.dtype == "float32" else "bfloat16"
    cache_memory = config.cache.cache_memory
    if cache_memory is None and device == "cpu":
        cache_memory = DEFAULT_CPU_CACHE_BYTES
    prefix_caching = config.cache.enable_prefix_caching
    if prefix_caching is None:
        prefix_caching = config.cache.mamba_cache_mode == "align"
    spec_tokens, spec_method = resolve_spec(config, facts)
    return replace(
        config,
        model=replace(
            config.model,
            device=device,
            dtype=dtype,
            max_model_len=config.model.max_model_len or facts.max_model_len,
        ),
        cache=replace(config.cache, cache_memory=cache_memory, enable_prefix_caching=prefix_caching),
        spec=replace(config.spec, spec_tokens=spec_tokens, spec_method=spec_method),
    )


def resolve_spec(config: EngineConfig, facts: CheckpointFacts) -> tuple[int, str | None]:
    """Drafts a step and where they come from. The default number shrinks to the room other options leave."""
    spec_tokens = config.spec.spec_tokens
    if spec_tokens is None:
        room = min(config.cache.mamba_block_size, config.scheduler.max_num_batched_tokens) - 1
        spec_tokens = min(DEFAULT_MODEL_SPEC_TOKENS, room) if facts.is_default else 0
    if spec_tokens == 0:
        return 0, None
    return spec_tokens, config.spec.spec_method or ("mtp" if facts.num_mtp_layers else "ngram")
