"""The engine in one thread: requests in, steps, outputs out. Knows the model and the scheduler, nothing of HTTP."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mambalign.engine.checkpoint import DEFAULT_MODEL, CheckpointFacts, load_tokenizer, locate, read_facts
from mambalign.engine.config import EngineConfig
from mambalign.engine.detokenizer import Detokenizer
from mambalign.engine.engine_plan import EnginePlan, refused_checkpoints
from mambalign.engine.messages import EngineOutput, EngineRequest, EngineStats
from mambalign.engine.option import ConfigError
from mambalign.engine.request import Request
from mambalign.engine.resolution import resolve
from mambalign.engine.scheduler import Scheduler
from mambalign.worker.batch import RunnerOutput, SchedulerOutput
from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.registry import load_model
from mambalign.worker.runner_v2 import PendingStep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass
class LiveRequest:
    """A request's way out: its text so far as the client sees it, and what the next output will bring."""

    request: Request
    detokenizer: Detokenizer
    new_text: str = ""


def empty_device_cache() -> None:
    """Give device memory that no tensor holds any more back, so that the next engine finds it free."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def cuda_capability(device: str) -> tuple[int, int] | None:
    """Compute capability of the GPU that `--device` may be; None without one. Asked of no GPU that is not wanted."""
    return torch.cuda.get_device_capability() if device != "cpu" and torch.cuda.is_available() else None


def ending_tokens(model: HybridModel, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokens that end a text: the checkpoint's configuration names them, else its tokenizer does, if it has one."""
    named = model.eos_token_ids or (tokenizer.eos_token_id,)
    return [token_id for token_id in named if token_id is not None and token_id < model.vocab_size]


class EngineCore:
    """Loads a model and serves requests step by step.

    Raises ConfigError for options that cannot be served, before any weight is loaded where that can be known.
    Not thread-safe: one thread calls everything.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None):
        say = progress or (lambda line: None)
        path = locate(config.model.model)
        self.facts: CheckpointFacts = read_facts(config.model.model, path)
        self.config = resolve(config, self.facts, cuda_capability=cuda_capability(config.model.device))
        has_no_tokenizer = self.config.model.load_format == "dummy" and not (path / "tokenizer.json").exists()
        self.tokenizer = load_tokenizer(DEFAULT_MODEL if has_no_tokenizer else path)
        self.max_model_len: int = self.config.model.max_model_len
        self.spec_tokens: int = self.config.spec.spec_tokens
        self.spec_method: str | None = self.config.spec.spec_method
        plan = EnginePlan(self.config, self.facts)
        on_cuda = self.config.model.device == "cuda"
        say(f"loading {self.facts.name} ({self.config.model.dtype}, {self.config.model.device})")
        dtype, device = getattr(torch, self.config.model.dtype), self.config.model.device
        with refused_checkpoints(self.facts.name):
            self.model = load_model(path, dtype, device, progress is not None, self.config.model.load_format)
        if self.spec_method == "mtp" and not self.model.has_mtp:
            raise ConfigError(f"{self.facts.name} has no weights of an MTP head; use --spec-method ngram")
        if self.config.spec.draft_head_dtype == "fp8":
            self.model.quantize_draft_head()
        if on_cuda:
            say("measuring memory, compiling kernels")
            plan.measure(self.model)
        self.vocab_size: int = self.model.vocab_size
        self.eos_token_ids: list[int] = ending_tokens(self.model, self.tokenizer)
        self.grammars = GrammarCompiler(self.tokenizer.backend_tokenizer, self.vocab_size, self.eos_token_ids)
        if on_cuda and not self.config.runner.enforce_eager:
            say("capturing CUDA graphs")
        self.runner = plan.make_runner(self.model, self.grammars)
        self.scheduler = Scheduler(plan.scheduler_limits(), self._append_token)
        self.memory_plan: dict[str, int] = plan.device_memory
        migration_kib = self.runner.align_ctx.staging_bytes / 1024
        self.plan = [*plan.describe(), f"migration buffers: {migration_kib:,.1f} KiB on {self.config.runner.runner}"]
        self._live: dict[str, LiveRequest] = {}
        self._endings: list[EngineOutput] = []  # of requests that ended between steps
        self._launched: deque[tuple[SchedulerOutput, RunnerOutput | PendingStep]] = deque()  # not booked yet

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
            num_ahead = 1 if self.scheduler.limits.schedules_ahead else 0
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
