"""Every option of the engine, one frozen dataclass per owner. The CLI and `LLM(**options)` are generated from these.

A field's metadata holds its help text (with units); its default is the CLI's default. "auto" values are resolved by
`resolve` (a pure function of the options and the checkpoint's facts), before any weight is loaded.
"""

from dataclasses import dataclass, field, fields
from typing import Any


class ConfigError(ValueError):
    """An option, or a combination of options, that cannot be served. The text names the option and the limit."""


def option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class ModelConfig:
    model: str | None = option(None, "checkpoint folder or hub id (none: the small model that ships)", positional=True)
    dtype: str = option("auto", "weights and activations", choices=("auto", "float32", "bfloat16"))
    device: str = option("auto", "device to run on", choices=("auto", "cpu", "cuda"))
    max_model_len: int | None = option(None, "longest prompt + output, tokens (none: the checkpoint's)")
    seed: int = option(0, "seed for requests that bring none")


@dataclass(frozen=True)
class CacheConfig:
    mamba_cache_mode: str = option("align", "keep states at block boundaries, or not", choices=("none", "align", "all"))
    mamba_block_size: int = option(128, "tokens per recurrent-state block, a multiple of --kv-block-size")
    mamba_conv_layout: str = option("SD", "conv state [state_len, dim] or [dim, state_len]", choices=("SD", "DS"))
    mamba_ssm_cache_dtype: str = option("float32", "temporal state", choices=("float32", "bfloat16", "float16"))
    kv_block_size: int = option(16, "tokens per KV block")
    cache_memory: int | None = option(None, "both caches together, bytes or 512MiB, 4GiB (none: 1GiB on CPU)", bytes=True)
    mamba_cache_fraction: float | None = option(None, "share of --cache-memory for states, 0..1 (none: auto)")
    enable_prefix_caching: bool | None = option(None, "look up and publish prefixes (none: on in align mode)")


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = option(16, "requests that run at once")
    max_num_batched_tokens: int = option(2048, "tokens a step, prompts and drafts together")


@dataclass(frozen=True)
class SpecConfig:
    spec_tokens: int | None = option(None, "draft tokens a step, 0..8 (none: 0, and 3 for the model that ships)")
    spec_method: str | None = option(None, "where drafts come from (none: mtp with a head, else ngram)", choices=("mtp", "ngram"))


@dataclass(frozen=True)
class RunnerConfig:
    runner: str = option("v1", "model runner", choices=("v1", "v2"))
    check_fused_copy: bool = option(False, "compare every state copy with the scalar path")


@dataclass(frozen=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on (0: any free one, printed)")
    served_model_name: str | None = option(None, "name in the API (none: the folder's name)")
    api_key: str | None = option(None, "require this bearer token")
    log_level: str = option("info", "log level", choices=("debug", "info", "warning", "error"))


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
        """Build from flat names (`spec_tokens=3`). Unknown names raise ConfigError."""
        parts = {}
        for part in fields(cls):
            owner = part.default_factory
            names = {f.name for f in fields(owner)} & options.keys()
            parts[part.name] = owner(**{name: options.pop(name) for name in names})
        if options:
            raise ConfigError(f"unknown option(s): {', '.join(sorted(options))}")
        return cls(**parts)
