"""What a checkpoint makes of the options: "auto" and None are filled in, what it cannot serve is refused.

Pure, and before any weight is loaded. Nothing here imports torch.
"""

from dataclasses import replace

from mambalign.engine.checkpoint import CheckpointFacts
from mambalign.engine.config import EngineConfig, validate
from mambalign.engine.option import ConfigError

DEFAULT_MODEL_SPEC_TOKENS = 3
DEFAULT_CPU_CACHE_BYTES = 1 << 30
FP8_CAPABILITY = (8, 9)  # compute capability from which tensor cores multiply fp8


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


def resolve(config: EngineConfig, facts: CheckpointFacts, *, cuda_capability: tuple[int, int] | None) -> EngineConfig:
    """Fill in every "auto" and None but `mamba_cache_fraction` and, on CUDA, `cache_memory`. Raises ConfigError.

    Those two are known when the weights are loaded. With `--spec-tokens 0` the method is None.
    cuda_capability: the compute capability of the CUDA device; None without one.
    """
    validate(config)
    check_checkpoint(config, facts)
    device = config.model.device
    if device == "cuda" and cuda_capability is None:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if device == "auto":
        device = "cpu" if cuda_capability is None else "cuda"
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
    multiplies_fp8 = device == "cuda" and cuda_capability is not None and cuda_capability >= FP8_CAPABILITY
    draft_head_dtype = resolve_draft_head(config.spec.draft_head_dtype, spec_method, multiplies_fp8)
    return replace(
        config,
        model=replace(
            config.model,
            device=device,
            dtype=dtype,
            max_model_len=config.model.max_model_len or facts.max_model_len,
        ),
        cache=replace(config.cache, cache_memory=cache_memory, enable_prefix_caching=prefix_caching),
        spec=replace(config.spec, spec_tokens=spec_tokens, spec_method=spec_method, draft_head_dtype=draft_head_dtype),
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


def resolve_draft_head(wanted: str, spec_method: str | None, multiplies_fp8: bool) -> str:
    """ "fp8" or "model": the copy of the head that drafts are taken from."""
    if wanted == "fp8" and not multiplies_fp8:
        raise ConfigError(
            "--draft-head-dtype fp8: needs --device cuda and a GPU of compute capability "
            f"{'.'.join(map(str, FP8_CAPABILITY))} or more; use --draft-head-dtype model"
        )
    if wanted == "fp8" and spec_method == "ngram":
        raise ConfigError("--draft-head-dtype fp8: drafts by ngram are taken from no head; leave it out")
    return "fp8" if wanted != "model" and multiplies_fp8 and spec_method == "mtp" else "model"
