"""Every option of the engine, one frozen dataclass per owner.

The CLI and `LLM(**options)` are generated from these; a field's default is the CLI's default. `validate` refuses what
no checkpoint could serve; `resolution.py` has what depends on the checkpoint. Nothing here imports torch.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from mambalign.engine.option import ConfigError, build_part, check_values, option
from mambalign.kernels.chunk_shape import DELTA_CHUNK, MAMBA2_CHUNK

MAX_SPEC_TOKENS = 8


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
    draft_head_dtype: str = option(
        "auto",
        "what drafts by mtp are taken from; fp8: a copy of the head, of half the bytes, that is faster and right a "
        "little less often; model: the head itself (auto: fp8 on a GPU that multiplies it); the text is the same",
        choices=("auto", "fp8", "model"),
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
