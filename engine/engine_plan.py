"""What start-up decides from options and a checkpoint: how much memory, which limits, which runner.

Loads no weight and knows no request. On CUDA it is complete once the loaded model has been measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mambalign.engine.capacity import PoolPlan, describe_pools, plan_pools
from mambalign.engine.checkpoint import CheckpointFacts
from mambalign.engine.config import CacheConfig, EngineConfig
from mambalign.engine.option import ConfigError
from mambalign.engine.resolution import check_chunks
from mambalign.engine.scheduler_limits import SchedulerLimits
from mambalign.kernels.draft_head import draft_head_bytes
from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.mamba_columns import cdiv
from mambalign.worker.model_step import RunnerLimits
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.loader import CheckpointError
from mambalign.worker.models.registry import family_of, weight_bytes
from mambalign.worker.runner_v1 import ModelRunnerV1
from mambalign.worker.runner_v2 import ModelRunnerV2
from mambalign.worker.state_cache import StateCache, bytes_per_kv_block, bytes_per_state
from mambalign.worker.warm_up import measure_activations


@contextmanager
def refused_checkpoints(name: str) -> Iterator[None]:
    """A checkpoint that cannot be served is the user's mistake, like a wrong option."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(f"model {name}: {error}") from error


class EnginePlan:
    """Of resolved options. Every step of it raises ConfigError for what cannot be served."""

    _pools: PoolPlan  # on CUDA filled by `measure`

    def __init__(self, config: EngineConfig, facts: CheckpointFacts):
        self.config = config
        self.facts = facts
        self.device_memory: dict[str, int] = {}  # bytes by use, on CUDA, where they are measured
        self._max_model_len: int = config.model.max_model_len
        self._num_spec_tokens: int = config.spec.spec_tokens
        self._drafts_by_mtp = config.spec.spec_method == "mtp"
        self._schedules_ahead = config.runner.runner == "v2"  # V2's steps are launched one ahead of the results
        self._read_specs()
        if config.model.device == "cuda":
            self._refuse_large_weights()
        else:
            self._plan_pools(config.cache.cache_memory)

    def measure(self, model: HybridModel) -> None:
        """On CUDA, once the weights are loaded: run the largest step, and divide the memory that it leaves."""
        self._check_chunks(model)
        self._plan_pools(self.config.cache.cache_memory or self._cache_memory(model))

    def _read_specs(self) -> None:
        """What the model keeps of each request, from the checkpoint's configuration alone."""
        dtype = getattr(torch, self.config.model.dtype)
        state_dtype = getattr(torch, self.config.cache.mamba_ssm_cache_dtype)
        with refused_checkpoints(self.facts.name):
            try:
                family, parsed = family_of(self.facts.path)
            except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
                raise CheckpointError(f"config.json: {type(error).__name__}: {error}") from error
        self._chunk_tokens: int | None = None  # of a prompt, that are scanned together; None: one at a time
        if self.config.runner.prefill_scan == "chunked":
            self._chunk_tokens = family.chunk_tokens
            check_chunks(self.config, family.chunk_tokens)
        self._attention_specs = parsed.attention_specs(dtype, with_drafter=self._drafts_by_mtp)
        self._state_specs = parsed.state_specs(dtype, state_dtype, with_drafter=self._drafts_by_mtp)
        self._conv_width = parsed.conv_width
        self._draft_head_bytes = 0  # beside the weights
        if self.config.spec.draft_head_dtype == "fp8":
            self._draft_head_bytes = draft_head_bytes(parsed.vocab_size, parsed.hidden_size)
        cache = self.config.cache
        if not self._has_temporal_states and cache.mamba_ssm_cache_dtype != CacheConfig.mamba_ssm_cache_dtype:
            raise ConfigError(f"--mamba-ssm-cache-dtype: {self.facts.name} has no temporal states; leave it out")

    def _check_chunks(self, model: HybridModel) -> None:
        state_dtype = getattr(torch, self.config.cache.mamba_ssm_cache_dtype)
        if self._chunk_tokens is not None and not model.chunks_are_right(state_dtype):
            raise ConfigError(
                f"--prefill-scan chunked: on this device the scan by chunks gives wrong values for {self.facts.name}; "
                "use --prefill-scan recurrent"
            )

    def _refuse_large_weights(self) -> None:
        free, total = torch.cuda.mem_get_info()
        budget = min(free, int(total * self.config.cache.gpu_memory_utilization))
        needed = weight_bytes(self.facts.path, getattr(torch, self.config.model.dtype)) + self._draft_head_bytes
        if needed > budget:
            raise ConfigError(
                f"{self.facts.name}: its weights take {needed / 2**30:.1f} GiB; the device has "
                f"{budget / 2**30:.1f} GiB free within --gpu-memory-utilization "
                f"{self.config.cache.gpu_memory_utilization}"
            )

    def _cache_memory(self, model: HybridModel) -> int:
        """Bytes that weights and the largest step leave of the share of device memory that is ours."""
        activations = measure_activations(
            model,
            self._attention_specs,
            self._state_specs,
            self._runner_limits(self.config.scheduler.max_num_seqs),
            num_tokens=min(self.config.scheduler.max_num_batched_tokens, self._max_model_len),
        )
        free, total = torch.cuda.mem_get_info()
        used = total - free
        cache_memory = int(total * self.config.cache.gpu_memory_utilization) - used - activations
        self.device_memory = {"weights and context": used, "activations": activations, "caches": cache_memory}
        if cache_memory <= 0:
            raise ConfigError(
                f"--gpu-memory-utilization {self.config.cache.gpu_memory_utilization}: {used / 2**30:.1f} GiB are in "
                f"use once weights are loaded, a step needs {activations / 2**30:.1f} GiB: nothing is left for caches"
            )
        return cache_memory

    def _plan_pools(self, cache_memory: int) -> None:
        """Divide the cache memory into pools."""
        cache, scheduler = self.config.cache, self.config.scheduler
        self._pools = plan_pools(
            cache_memory=cache_memory,
            mamba_fraction=cache.mamba_cache_fraction,
            max_num_seqs=min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens + 1 - (self._chunk_tokens or 1)),
            max_model_len=self._max_model_len,
            num_lookahead_tokens=self._num_lookahead_tokens,
            **self._sizes(),
        )

    def _sizes(self) -> dict[str, Any]:
        """What `plan_pools` and `describe_pools` both take."""
        kv_block_tokens = self.config.cache.kv_block_size
        return dict(
            kv_block_bytes=bytes_per_kv_block(self._attention_specs, kv_block_tokens),
            state_bytes=bytes_per_state(self._state_specs, self._conv_width, self._num_spec_tokens),
            kv_block_tokens=kv_block_tokens,
            mamba_block_tokens=self._mamba_block_tokens,
            num_spec_tokens=self._num_spec_tokens,
            schedules_ahead=self._schedules_ahead,
        )

    def make_runner(self, model: HybridModel, grammars: GrammarCompiler) -> ModelRunnerV1 | ModelRunnerV2:
        """Allocate both pools, and the runner over them."""
        cache = self.config.cache
        try:
            state_cache = StateCache.allocate(
                self._attention_specs,
                self._state_specs,
                num_kv_blocks=self._pools.num_kv_blocks,
                num_mamba_blocks=self._pools.num_mamba_blocks,
                kv_block_tokens=cache.kv_block_size,
                mamba_block_tokens=self._mamba_block_tokens,
                conv_layout=cache.mamba_conv_layout,
                conv_width=self._conv_width,
                num_spec_tokens=self._num_spec_tokens,
                device=self.config.model.device,
            )
        except RuntimeError as error:  # torch's, on either device, when there is no such memory
            raise ConfigError(
                f"--cache-memory: the caches cannot be allocated: {str(error).splitlines()[0]}"
            ) from error
        limits = self._runner_limits(self._pools.max_num_seqs)
        make = ModelRunnerV2 if self._schedules_ahead else ModelRunnerV1
        return make(model, state_cache, limits, grammars)

    def _runner_limits(self, max_num_seqs: int) -> RunnerLimits:
        options = self.config.runner
        return RunnerLimits(
            max_num_seqs=max_num_seqs,
            max_model_len=self._max_model_len,
            num_spec_tokens=self._num_spec_tokens,
            spec_method=self.config.spec.spec_method,
            check_fused_copy_rate=options.check_fused_copy_rate if options.check_fused_copy else 0.0,
            step_graphs=self.config.model.device == "cuda" and not options.enforce_eager,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            by_chunk=self._chunk_tokens is not None,
            spec_acceptance=self.config.spec.spec_acceptance,
        )

    @property
    def _has_temporal_states(self) -> bool:
        return any(spec.kind == "temporal" for spec in self._state_specs)

    @property
    def _num_lookahead_tokens(self) -> int:
        """KV slots past a step's tokens that the MTP drafter writes."""
        return max(1, self._num_spec_tokens) if self._drafts_by_mtp else 0

    @property
    def _mamba_block_tokens(self) -> int:
        """Mode none keeps no boundary: one block spans the longest text, so no step ever crosses one."""
        cache = self.config.cache
        if cache.mamba_cache_mode == "align":
            return cache.mamba_block_size
        return cdiv(self._max_model_len + self._num_spec_tokens + 1, cache.kv_block_size) * cache.kv_block_size

    def scheduler_limits(self) -> SchedulerLimits:
        cache = self.config.cache
        return SchedulerLimits(
            max_num_seqs=self._pools.max_num_seqs,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            max_model_len=self._max_model_len,
            num_spec_tokens=self._num_spec_tokens,
            kv_block_tokens=cache.kv_block_size,
            mamba_block_tokens=self._mamba_block_tokens,
            num_kv_blocks=self._pools.num_kv_blocks,
            num_mamba_blocks=self._pools.num_mamba_blocks,
            enable_prefix_caching=cache.enable_prefix_caching,
            num_lookahead_tokens=self._num_lookahead_tokens,
            schedules_ahead=self._schedules_ahead,
            chunk_tokens=self._chunk_tokens,
        )

    def describe(self) -> list[str]:
        """Lines for people."""
        model, cache, spec = self.config.model, self.config.cache, self.config.spec
        drafts = f"{spec.spec_tokens} a step by {spec.spec_method}" if spec.spec_tokens else "none"
        drafts += ", head read in fp8" if spec.draft_head_dtype == "fp8" else ""
        states = f"conv states {cache.mamba_conv_layout}"
        if self._has_temporal_states:
            scan = self.config.runner.prefill_scan
            states += f", temporal states {cache.mamba_ssm_cache_dtype}, prompts scanned {scan}"
        lines = [
            f"model: {self.facts.name}, {model.dtype} on {model.device}, "
            f"up to {model.max_model_len:,} tokens a request",
            f"runner: {self.config.runner.runner}, {states}",
            f"drafts: {drafts}",
        ]
        if self.device_memory:
            gib = ", ".join(f"{name} {num_bytes / 2**30:.2f} GiB" for name, num_bytes in self.device_memory.items())
            lines.append(f"device memory: {gib}")
        return lines + describe_pools(self._pools, prefix_caching=cache.enable_prefix_caching, **self._sizes())
