"""An engine without a model: it answers with its prompt, over and over. Special tokens make it misbehave.

A prompt with a text between SAY and its end makes it answer that, and stop.

As a program it is the real server around that core: `python fake_core.py MODEL [options]`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mambalign.engine.checkpoint import read_facts
from mambalign.engine.config import EngineConfig
from mambalign.engine.detokenizer import Detokenizer
from mambalign.engine.messages import EngineOutput, EngineRequest, EngineStats
from mambalign.engine.option import ConfigError
from mambalign.engine.resolution import resolve
from mambalign.worker.sampling_params import TokenLogprobs

CORE = "fake_core:FakeCore"
MAX_MODEL_LEN = 256
STEP_SECONDS = 0.01  # of a step with a <slow> request
SPECIAL = ["</s>", "<crash>", "<die>", "<error>", "<slow>", "<memory>"]  # ids 0 to 5
EOS, CRASH, DIE, ERROR, SLOW, MEMORY = range(len(SPECIAL))
NO_MEMORY_SEED = 666  # a core with this seed cannot start
SAY = ("{say:", ":say}")
CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"


def make_checkpoint(
    folder: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    max_len: int = MAX_MODEL_LEN,
    special: tuple[str, ...] = (),
) -> Path:
    """Write a tokenizer of single bytes and the facts that options need. No weights. `special`: more such tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *special)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    if chat_template:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    facts = {"model_type": "nemotron_h", "max_position_embeddings": max_len, "vocab_size": len(vocab)}
    (folder / "config.json").write_text(json.dumps(facts | {"num_nextn_predict_layers": 1}))
    return folder


class LightTokenizer:
    """The checkpoint's tokenizer without transformers, which takes seconds to import."""

    def __init__(self, folder: Path):
        self.backend = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)


class FakeCore:
    """`EngineCore`'s interface. A step gives every request 1 + spec_tokens tokens; prompts seen are cached."""

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None):
        path = Path(config.model.model or "")
        facts = read_facts(config.model.model, path)
        config = resolve(config, facts, cuda_capability=None)
        if config.cache.cache_memory < 1000:
            raise ConfigError(f"--cache-memory {config.cache.cache_memory}: at least 1000 bytes")
        if progress:
            progress("loading nothing")
        if config.model.seed == NO_MEMORY_SEED:
            raise MemoryError("no memory left")
        self.tokenizer = LightTokenizer(path)
        self.plan = ["pools: none"]
        self.max_model_len = config.model.max_model_len
        self.vocab_size = facts.vocab_size
        self.eos_token_ids = [EOS]
        self.config = config
        self.spec_tokens, self.spec_method = config.spec.spec_tokens, config.spec.spec_method
        self._requests: dict[str, EngineRequest] = {}
        self._ids: dict[str, list[int]] = {}
        self._detokenizers: dict[str, Detokenizer] = {}
        self._replies: dict[str, list[int]] = {}
        self._cached: dict[str, int] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._endings: list[EngineOutput] = []
        self._stats = EngineStats(spec_decode_accepted_per_position=[0] * self.spec_tokens)

    def add_request(self, request: EngineRequest) -> None:
        request.params.validate(self.vocab_size)
        if not request.prompt_token_ids or len(request.prompt_token_ids) >= self.max_model_len:
            raise ValueError(f"prompt must hold 1 to {self.max_model_len - 1} tokens")
        prompt = tuple(request.prompt_token_ids)
        is_cached = prompt in self._seen and request.params.prompt_logprobs is None
        self._cached[request.request_id] = len(prompt) - 1 if is_cached else 0
        self._seen.add(prompt)
        self._requests[request.request_id] = request
        params, name = request.params, request.request_id
        self._ids[name], self._replies[name] = [], self._reply(request.prompt_token_ids)
        self._detokenizers[name] = Detokenizer(
            self.tokenizer.backend, (), params.stop, skip_special_tokens=params.skip_special_tokens
        )
        self._count(
            prompt_tokens_total=len(prompt),
            prefix_cache_queries_total=len(prompt),
            prefix_cache_hits_total=self._cached[request.request_id],
        )

    def _reply(self, prompt: list[int]) -> list[int]:
        """What the prompt says to say, with an end; else as much of the prompt as can be needed."""
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        if SAY[0] in text:
            return [*self.tokenizer.encode(text.partition(SAY[0])[2].partition(SAY[1])[0]), EOS]
        return (prompt * (self.max_model_len // len(prompt) + 2))[: self.max_model_len + 1]

    def abort(self, request_id: str) -> None:
        if self._requests.pop(request_id, None):
            self._endings.append(EngineOutput(request_id, finish_reason="abort"))

    def has_work(self) -> bool:
        return bool(self._requests or self._endings)

    def step(self) -> list[EngineOutput]:
        outputs, self._endings = self._endings, []
        if any(SLOW in request.prompt_token_ids for request in self._requests.values()):
            time.sleep(STEP_SECONDS)
        for request in list(self._requests.values()):
            if CRASH in request.prompt_token_ids:
                raise RuntimeError("told to crash")
            if MEMORY in request.prompt_token_ids:
                raise MemoryError("no memory left")
            if DIE in request.prompt_token_ids:
                os.kill(os.getpid(), signal.SIGKILL)
            output = self._advance(request)
            if output.finish_reason:
                del self._requests[request.request_id]
            outputs.append(output)
        return outputs

    def _advance(self, request: EngineRequest) -> EngineOutput:
        params, prompt = request.params, request.prompt_token_ids
        ids, detokenizer = self._ids[request.request_id], self._detokenizers[request.request_id]
        if ERROR in prompt:
            return EngineOutput(request.request_id, finish_reason="error", error="told to fail")
        room = min(params.max_tokens, self.max_model_len - len(prompt)) - len(ids)
        reply = self._replies[request.request_id]
        new, text, reason = [], "", None
        while len(new) < min(1 + self.spec_tokens, room) and reason is None:
            new.append(reply[len(ids)])
            ids.append(new[-1])
            if len(ids) == len(reply):  # its end
                reason, text = "stop", text + detokenizer.finish()
                break
            text += detokenizer.append(new[-1])
            if detokenizer.stop_string is not None:
                reason = "stop"
        if reason is None and len(new) == room:
            reason = "length"
            text += detokenizer.finish()
        drafts = len(ids) - 1
        of_prompt = None
        if params.prompt_logprobs is not None and len(new) == len(ids):
            of_prompt = [self._logprobs(t, params.prompt_logprobs) for t in prompt[1:]]
        self._count(
            generation_tokens_total=len(new),
            spec_decode_num_drafts_total=1,
            spec_decode_num_draft_tokens_total=self.spec_tokens,
            spec_decode_num_accepted_tokens_total=len(new) - 1,
        )
        return EngineOutput(
            request_id=request.request_id,
            new_text=text,
            new_token_ids=new,
            new_logprobs=[self._logprobs(t, params.logprobs) for t in new] if params.logprobs is not None else None,
            prompt_logprobs=of_prompt,
            finish_reason=reason,
            stop_reason=detokenizer.stop_string,
            num_cached_tokens=self._cached[request.request_id],
            num_draft_tokens=drafts + 1,
            num_accepted_tokens=drafts,
        )  # fmt: skip

    def _logprobs(self, token_id: int, top: int) -> TokenLogprobs:
        return TokenLogprobs(-0.5, [token_id, *range(100, 99 + top)][:top], [-0.5 - i for i in range(top)])

    def _count(self, **more: int) -> None:
        totals = {name: getattr(self._stats, name) + value for name, value in more.items()}
        self._stats = msgspec.structs.replace(self._stats, **totals)

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self._stats, num_requests_running=len(self._requests))

    def reset_prefix_cache(self) -> bool:
        self._seen.clear()
        return not self._requests

    def check(self) -> None:
        assert not self._requests, "requests are left"

    def free_blocks(self) -> dict[str, tuple[int, int]]:
        return {"kv": (10 - len(self._requests), 10)}


if __name__ == "__main__":
    from mambalign.engine.cli import make_parser, parse
    from mambalign.engine.server.run import run_server

    sys.exit(run_server(*parse(make_parser("serve"), sys.argv[1:]), core=CORE))
