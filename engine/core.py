"""The engine in one thread: requests in, steps, outputs out. Knows the model and the scheduler, nothing of HTTP."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mambalign.engine.capacity import describe, plan_pools
from mambalign.engine.checkpoint import DEFAULT_MODEL, CheckpointFacts, load_tokenizer, locate, read_facts
from mambalign.engine.config import EngineConfig
from mambalign.engine.detokenizer import Detokenizer
from mambalign.engine.messages import EngineOutput, EngineRequest, EngineStats
from mambalign.engine.option import ConfigError
from mambalign.engine.request import Request
from mambalign.engine.resolution import check_chunks, resolve
from mambalign.engine.scheduler import Scheduler
from mambalign.engine.scheduler_limits import SchedulerLimits
from mambalign.worker.batch import RunnerOutput, SchedulerOutput
from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.mamba_columns import cdiv
from mambalign.worker.model_step import RunnerLimits
from mambalign.worker.models.loader import CheckpointError
from mambalign.worker.models.registry import family_of, load_model, weight_bytes
from mambalign.worker.runner_v1 import ModelRunnerV1
from mambalign.worker.runner_v2 import ModelRunnerV2, PendingStep
from mambalign.worker.state_cache import StateCache, bytes_per_kv_block, bytes_per_state
from mambalign.worker.warm_up import measure_activations

logger = logging.getLogger(__name__)


@dataclass
class LiveRequest:
    """A request's way out: its text so far as the client sees it, and what the next output will bring."""

    request: Request
    detokenizer: Detokenizer
    new_text: str = ""


@contextmanager
def refused_checkpoints(name: str) -> Iterator[None]:
    """A checkpoint that cannot be served is the user's mistake, like a wrong option."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(f"model {name}: {error}") from error


def empty_device_cache() -> None:
    """Give device memory that no tensor holds any more back, so that the next engine finds it free."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class EngineCore:
    """Loads a model and serves requests step by step.

    Raises ConfigError for options that cannot be served, before any weight is loaded where that can be known.
    Not thread-safe: one thread calls everything.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None):
        say = progress or (lambda line: None)
        path = locate(config.model.model)
        self.facts: CheckpointFacts = read_facts(config.model.model, path)
        self.config = resolve(config, self.facts, cuda_available=torch.cuda.is_available())
        has_no_tokenizer = self.config.model.load_format == "dummy" and not (path / "tokenizer.json").exists()
        self.tokenizer = load_tokenizer(DEFAULT_MODEL if has_no_tokenizer else path)
        self.max_model_len: int = self.config.model.max_model_len
        self.spec_tokens: int = self.config.spec.spec_tokens
        self.spec_method: str | None = self.config.spec.spec_method
        self.memory_plan: dict[str, int] = {}  # bytes of device memory, on CUDA
        self._read_specs(path)
        on_cuda = self.config.model.device == "cuda"
        if on_cuda:
            self._refuse_large_weights(path)
        else:
            self._plan_memory(self.config.cache.cache_memory)
        say(f"loading {self.facts.name} ({self.config.model.dtype}, {self.config.model.device})")
        dtype, device = getattr(torch, self.config.model.dtype), self.config.model.device
        with refused_checkpoints(self.facts.name):
            self.model = load_model(path, dtype, device, progress is not None, self.config.model.load_format)
        if self.spec_method == "mtp" and not self.model.has_mtp:
            raise ConfigError(f"{self.facts.name} has no weights of an MTP head; use --spec-method ngram")
        if on_cuda:
            say("measuring memory, compiling kernels")
            self._check_chunks()
            self._plan_memory(self.config.cache.cache_memory or self._cuda_cache_memory())
        self.vocab_size: int = self.model.vocab_size
        self.eos_token_ids: list[int] = list(self.model.eos_token_ids)
        self.grammars = GrammarCompiler(self.tokenizer.backend_tokenizer, self.vocab_size, self.eos_token_ids)
        if on_cuda and not self.config.runner.enforce_eager:
            say("capturing CUDA graphs")
        self.runner = self._make_runner()
        self._live: dict[str, LiveRequest] = {}
        self._endings: list[EngineOutput] = []  # of requests that ended between steps
        self._launched: deque[tuple[SchedulerOutput, RunnerOutput | PendingStep]] = deque()  # not booked yet

    def _read_specs(self, path: Path) -> None:
        """What the model keeps of each request, from the checkpoint's configuration alone."""
        dtype = getattr(torch, self.config.model.dtype)
        state_dtype = getattr(torch, self.config.cache.mamba_ssm_cache_dtype)
        drafts_by_mtp = self.spec_method == "mtp"
        with refused_checkpoints(self.facts.name):
            try:
                family, parsed = family_of(path)
            except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
                raise CheckpointError(f"config.json: {type(error).__name__}: {error}") from error
        self._chunk_tokens: int | None = None  # of a prompt, that are scanned together; None: one at a time
        if self.config.runner.prefill_scan == "chunked":
            self._chunk_tokens = family.chunk_tokens
            check_chunks(self.config, family.chunk_tokens)
        self._attention_specs = parsed.attention_specs(dtype, with_drafter=drafts_by_mtp)
        self._state_specs = parsed.state_specs(dtype, state_dtype, with_drafter=drafts_by_mtp)
        self._conv_width = parsed.conv_width

    def _check_chunks(self) -> None:
        state_dtype = getattr(torch, self.config.cache.mamba_ssm_cache_dtype)
        if self._chunk_tokens is not None and not self.model.chunks_are_right(state_dtype):
            raise ConfigError(
                f"--prefill-scan chunked: on this device the scan by chunks gives wrong values for {self.facts.name}; "
                "use --prefill-scan recurrent"
            )

    def _refuse_large_weights(self, path: Path) -> None:
        free, total = torch.cuda.mem_get_info()
        budget = min(free, int(total * self.config.cache.gpu_memory_utilization))
        needed = weight_bytes(path, getattr(torch, self.config.model.dtype))
        if needed > budget:
            raise ConfigError(
                f"{self.facts.name}: its weights take {needed / 2**30:.1f} GiB; the device has "
                f"{budget / 2**30:.1f} GiB free within --gpu-memory-utilization "
                f"{self.config.cache.gpu_memory_utilization}"
            )

    def _cuda_cache_memory(self) -> int:
        """Bytes that weights and the largest step leave of the share of device memory that is ours."""
        activations = measure_activations(
            self.model,
            self._attention_specs,
            self._state_specs,
            self._runner_limits(self.config.scheduler.max_num_seqs),
            num_tokens=min(self.config.scheduler.max_num_batched_tokens, self.max_model_len),
        )
        free, total = torch.cuda.mem_get_info()
        used = total - free
        cache_memory = int(total * self.config.cache.gpu_memory_utilization) - used - activations
        self.memory_plan = {"weights and context": used, "activations": activations, "caches": cache_memory}
        if cache_memory <= 0:
            raise ConfigError(
                f"--gpu-memory-utilization {self.config.cache.gpu_memory_utilization}: {used / 2**30:.1f} GiB are in "
                f"use once weights are loaded, a step needs {activations / 2**30:.1f} GiB: nothing is left for caches"
            )
        return cache_memory

    def _plan_memory(self, cache_memory: int) -> None:
        """Divide the cache memory into pools."""
        cache, scheduler = self.config.cache, self.config.scheduler
        lookahead = max(1, self.spec_tokens) if self.spec_method == "mtp" else 0
        sizes = dict(
            kv_block_bytes=bytes_per_kv_block(self._attention_specs, cache.kv_block_size),
            state_bytes=bytes_per_state(self._state_specs, self._conv_width, self.spec_tokens),
            kv_block_tokens=cache.kv_block_size,
            mamba_block_tokens=self._mamba_block_tokens(),
            num_spec_tokens=self.spec_tokens,
            schedules_ahead=self._schedules_ahead,
        )
        self._pools = plan_pools(
            cache_memory=cache_memory,
            mamba_fraction=cache.mamba_cache_fraction,
            max_num_seqs=min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens + 1 - (self._chunk_tokens or 1)),
            max_model_len=self.max_model_len,
            num_lookahead_tokens=lookahead,
            **sizes,
        )
        self.plan = self._describe_options()
        if self.memory_plan:
            gib = ", ".join(f"{name} {num_bytes / 2**30:.2f} GiB" for name, num_bytes in self.memory_plan.items())
            self.plan.append(f"device memory: {gib}")
        self.plan += describe(self._pools, prefix_caching=cache.enable_prefix_caching, **sizes)
        self.scheduler = Scheduler(self._limits(lookahead), self._append_token)

    def _make_runner(self) -> ModelRunnerV1 | ModelRunnerV2:
        """Allocate both pools, and the runner over them."""
        options, cache = self.config.runner, self.config.cache
        try:
            state_cache = StateCache.allocate(
                self._attention_specs,
                self._state_specs,
                num_kv_blocks=self._pools.num_kv_blocks,
                num_mamba_blocks=self._pools.num_mamba_blocks,
                kv_block_tokens=cache.kv_block_size,
                mamba_block_tokens=self._mamba_block_tokens(),
                conv_layout=cache.mamba_conv_layout,
                conv_width=self.model.conv_width,
                num_spec_tokens=self.spec_tokens,
                device=self.config.model.device,
            )
        except RuntimeError as error:  # torch's, on either device, when there is no such memory
            raise ConfigError(
                f"--cache-memory: the caches cannot be allocated: {str(error).splitlines()[0]}"
            ) from error
        limits = self._runner_limits(self._pools.max_num_seqs)
        make = ModelRunnerV2 if self._schedules_ahead else ModelRunnerV1
        runner = make(self.model, state_cache, limits, self.grammars)
        self.plan.append(f"migration buffers: {runner.align_ctx.staging_bytes / 1024:,.1f} KiB on {options.runner}")
        return runner

    def _runner_limits(self, max_num_seqs: int) -> RunnerLimits:
        options = self.config.runner
        return RunnerLimits(
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            num_spec_tokens=self.spec_tokens,
            spec_method=self.spec_method,
            check_fused_copy_rate=options.check_fused_copy_rate if options.check_fused_copy else 0.0,
            step_graphs=self.config.model.device == "cuda" and not options.enforce_eager,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            by_chunk=self._chunk_tokens is not None,
            spec_acceptance=self.config.spec.spec_acceptance,
        )

    @property
    def _schedules_ahead(self) -> bool:
        """V2's steps are launched one ahead of the results."""
        return self.config.runner.runner == "v2"

    def _mamba_block_tokens(self) -> int:
        """Mode none keeps no boundary: one block spans the longest text, so no step ever crosses one."""
        cache = self.config.cache
        if cache.mamba_cache_mode == "align":
            return cache.mamba_block_size
        return cdiv(self.max_model_len + self.spec_tokens + 1, cache.kv_block_size) * cache.kv_block_size

    def _limits(self, lookahead: int) -> SchedulerLimits:
        cache = self.config.cache
        return SchedulerLimits(
            max_num_seqs=self._pools.max_num_seqs,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_spec_tokens=self.spec_tokens,
            kv_block_tokens=cache.kv_block_size,
            mamba_block_tokens=self._mamba_block_tokens(),
            num_kv_blocks=self._pools.num_kv_blocks,
            num_mamba_blocks=self._pools.num_mamba_blocks,
            enable_prefix_caching=cache.enable_prefix_caching,
            num_lookahead_tokens=lookahead,
            schedules_ahead=self._schedules_ahead,
            chunk_tokens=self._chunk_tokens,
        )

    def _describe_options(self) -> list[str]:
        model, cache = self.config.model, self.config.cache
        drafts = f"{self.spec_tokens} a step by {self.spec_method}" if self.spec_tokens else "none"
        return [
            f"model: {self.facts.name}, {model.dtype} on {model.device}, up to {self.max_model_len:,} tokens a request",
            f"runner: {self.config.runner.runner}, conv states {cache.mamba_conv_layout}, "
            f"states {cache.mamba_ssm_cache_dtype}, prompts scanned {self.config.runner.prefill_scan}",
            f"drafts: {drafts}",
        ]

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises ValueError, naming the field and the limit, when it can never run."""
        request.params.validate(self.vocab_size)
        for token_id in request.prompt_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"prompt: token id {token_id} is not in 0..{self.vocab_size - 1}")
        if request.params.structured_outputs is not None:
            self.grammars.compile(request.params.structured_outputs)
        live = Request(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            choice=request.choice,
            arrival_time=request.arrival_time,
            cache_salt=request.cache_salt,
        )
        self.scheduler.add_request(live)
        params = request.params
        detokenizer = Detokenizer(
            self.tokenizer.backend_tokenizer,
            request.prompt_token_ids,
            params.stop,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._live[request.request_id] = LiveRequest(live, detokenizer)

    def abort(self, request_id: str) -> None:
        """End a request now; its last output, with finish_reason "abort", comes with the next step."""
        request = self.scheduler.finish(request_id, "abort")
        if request is not None:
            live = self._live.pop(request_id)
            live.new_text += live.detokenizer.finish()
            self._endings.append(self._output(live, [], None))

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._endings) or bool(self._launched)

    def step(self) -> list[EngineOutput]:
        """Launch a step, if one can be planned, and book what is due; the outputs of rows that gained or ended."""
        outputs, self._endings = self._endings, []
        scheduled = self.scheduler.schedule()
        num_ahead = 0
        for new in scheduled.new_rows:
            request = self.scheduler.requests[new.request_id]
            if request.queue_seconds is None:
                request.queue_seconds = max(0.0, time.time() - request.arrival_time)
        if scheduled.rows:
            self._launched.append((scheduled, self.runner.execute_model(scheduled)))
            num_ahead = 1 if self._schedules_ahead else 0
        while len(self._launched) > num_ahead:
            outputs += self._book(*self._launched.popleft())
        return outputs

    def _book(self, scheduled: SchedulerOutput, launched: RunnerOutput | PendingStep) -> list[EngineOutput]:
        result, outputs = launched.result(), []
        admissions = {row.request_id: row.admission for row in scheduled.rows}
        failures = [(row.request_id, row.error) for row in result.results if row.error]
        for mismatch in result.mismatches:
            logger.error("fused copy check failed for request %s: %s", mismatch.request_id, mismatch.text)
            failures.append((mismatch.request_id, "its state was not copied right: see the server's log"))
        for request_id, text in failures:
            live = self._live.get(request_id)
            if live is not None and live.request.admission == admissions[request_id]:  # not a later one
                logger.warning("request %s failed: %s", request_id, text)
                outputs.append(self._fail(request_id, text))
        for request, tokens, row in self.scheduler.update(scheduled, result):
            live = self._live[request.request_id]
            if request.finish_reason is not None:
                del self._live[request.request_id]
            if tokens or request.finish_reason is not None:
                outputs.append(self._output(live, tokens, row.logprobs))
        return outputs

    def _fail(self, request_id: str, error: str) -> EngineOutput:
        """End a live request with an error now; what it cached before anything proved it right is cached no more."""
        self.scheduler.blocks.cache.forget_untested(self.scheduler.finish(request_id, "error"))
        return self._output(self._live.pop(request_id), [], None, error)

    def _output(
        self, live: LiveRequest, tokens: list[int], logprobs: list | None, error: str | None = None
    ) -> EngineOutput:
        request, text = live.request, live.new_text
        live.new_text = ""
        is_first = bool(tokens) and len(tokens) == request.num_output_tokens
        of_prompt = request.prompt_logprobs if is_first and request.params.prompt_logprobs is not None else None
        return EngineOutput(
            request_id=request.request_id,
            new_text=text,
            new_token_ids=tokens,
            new_logprobs=logprobs[: len(tokens)] if logprobs is not None else None,
            prompt_logprobs=of_prompt,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=error,
            num_cached_tokens=request.num_cached_tokens or 0,
            queue_seconds=request.queue_seconds or 0.0,
            num_draft_tokens=request.num_draft_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
        )

    def _append_token(self, request: Request, token_id: int) -> bool:
        """Add one token to a request's text and say whether that ends it, as if tokens came one at a time."""
        live, params = self._live[request.request_id], request.params
        request.append(token_id)
        is_eos = token_id in self.eos_token_ids and not params.ignore_eos
        if request.num_output_tokens >= params.min_tokens and (is_eos or token_id in params.stop_token_ids):
            request.finish_reason = "stop"
            request.stop_reason = None if is_eos else token_id
        else:
            live.new_text += live.detokenizer.append(token_id)
            if live.detokenizer.stop_string is not None:
                request.finish_reason, request.stop_reason = "stop", live.detokenizer.stop_string
            elif request.num_tokens >= self.scheduler.max_total_tokens(request):
                request.finish_reason = "length"
        if request.finish_reason is None:
            return False
        live.new_text += live.detokenizer.finish()
        return True

    def stats(self) -> EngineStats:
        """Totals since start and gauges of now."""
        scheduler, c = self.scheduler, self.scheduler.counters
        kv, mamba = scheduler.blocks.kv_pool, scheduler.blocks.mamba_pool
        copies, checker = self.runner.copy_totals(), self.runner.checker
        return EngineStats(
            num_requests_running=len(scheduler.running),
            num_requests_waiting=len(scheduler.waiting),
            kv_cache_usage=1 - kv.num_free / kv.num_usable,
            mamba_cache_usage=1 - mamba.num_free / mamba.num_usable,
            kv_cache_blocks=kv.counts(),
            mamba_cache_blocks=mamba.counts(),
            prefix_cache_queries_total=c.prefix_queries,
            prefix_cache_hits_total=c.prefix_hits,
            prefix_cache_misses=dict(c.prefix_misses),
            num_preemptions_total=c.preemptions,
            prompt_tokens_total=c.prompt_tokens,
            generation_tokens_total=c.generation_tokens,
            spec_decode_num_drafts_total=c.drafted_rows,
            spec_decode_num_draft_tokens_total=c.draft_tokens,
            spec_decode_num_accepted_tokens_total=c.accepted_tokens,
            spec_decode_accepted_per_position=list(c.accepted_per_position),
            precopies_total=copies.precopies,
            precopies_biased_total=copies.precopies_biased,
            postcopies_total=copies.postcopies,
            fused_copy_checks={str(bias): count for bias, count in checker.checks.items()} if checker else {},
            fused_copy_copies={str(bias): count for bias, count in checker.copies.items()} if checker else {},
            fused_copy_mismatches_total=checker.num_mismatches if checker else 0,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False when running requests still hold some of the blocks."""
        return self.scheduler.reset_prefix_cache()

    def check(self) -> None:
        """Walk every pool, the prefix tree and every request; raises AssertionError on a contradiction."""
        self.scheduler.check()
        assert self._live.keys() == self.scheduler.requests.keys()

    def free_blocks(self) -> dict[str, tuple[int, int]]:
        """Pool name -> (blocks that nobody holds, all blocks)."""
        pools = (self.scheduler.blocks.kv_pool, self.scheduler.blocks.mamba_pool)
        return {pool.name: (pool.num_free, pool.num_usable) for pool in pools}
