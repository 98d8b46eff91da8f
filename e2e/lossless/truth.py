"""What a text, its log-probabilities and its memory must be: the reference engine's, computed once in a process."""

import functools
import importlib
import inspect
import json
import random
import tempfile
from pathlib import Path

import msgspec
import torch
from cells import default_model, default_path
from lossless.plan import NUM_TOP_LOGPROBS
from tokenizers import Tokenizer
from transformers import Lfm2Config, Lfm2ForCausalLM

from mambalign.engine.checkpoint import load_tokenizer
from mambalign.engine.reference import STATE_BLOCK, Generation, ReferenceEngine
from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.logprobs import LogprobCopy
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.registry import load_model
from mambalign.worker.sampling_params import SamplingParams, TokenLogprobs
from mambalign.worker.state_cache import StateCache
from mambalign.worker.tests import served, test_lfm2
from mambalign.worker.tests.nemotron_checkpoints import DENSE, write_checkpoint

TINY = DENSE["odd"] | {"pattern": "M*M", "intermediate_size": 64}
STREAM_MODULES = ("argparse", "heapq", "zipfile")  # whose source the shipped model goes on with
STREAM_TOKENS = 1024
TEXT_GRAIN = 16  # texts are computed in multiples of so many tokens, so that they are found again


class EndlessReference(ReferenceEngine):
    """Goes on behind end-of-text and stop tokens: where a text ends is found by those who ask."""

    def _is_end(self, output_token_ids: list[int], params: SamplingParams) -> bool:
        return False


class Memory(msgspec.Struct, frozen=True):
    """What a text leaves in the caches of an engine that runs it alone, in one piece."""

    conv: list[torch.Tensor]  # per layer [W-1, dim]
    temporal: list[torch.Tensor]
    hidden: torch.Tensor  # of its last token
    keys: list[torch.Tensor]  # per attention layer [tokens, heads, head_dim]
    values: list[torch.Tensor]


class Truth:
    """One model, and all that has been asked about it."""

    def __init__(self, path: Path, model: HybridModel, streams: list[list[int]]):
        self.path, self.model, self.streams = path, model, streams
        self.tokenizer: Tokenizer = load_tokenizer(path).backend_tokenizer
        grammars = GrammarCompiler(self.tokenizer, model.vocab_size, model.eos_token_ids)
        self._reference = EndlessReference(model, grammars=grammars)
        self._texts: dict[tuple[tuple[int, ...], bytes, int], Generation] = {}
        self._memories: dict[tuple[int, ...], Memory] = {}

    def text(self, prompt: list[int], params: SamplingParams, choice: int, num_tokens: int) -> Generation:
        """At least `num_tokens` tokens that follow, with log-probabilities; nothing ends them."""
        num_tokens = -(-num_tokens // TEXT_GRAIN) * TEXT_GRAIN
        is_drawn = not params.is_greedy
        seed, choice = (params.seed, choice) if is_drawn else (0, 0)
        if params.min_tokens == 0:
            params = msgspec.structs.replace(params, stop_token_ids=[], ignore_eos=True)
        plain = {"stop": [], "max_tokens": 1, "n": 1, "logprobs": NUM_TOP_LOGPROBS, "prompt_logprobs": None}
        params = msgspec.structs.replace(params, seed=seed, **plain)
        key = (tuple(prompt), msgspec.msgpack.encode(params), choice)
        if key not in self._texts or len(self._texts[key].token_ids) < num_tokens:
            params = msgspec.structs.replace(params, max_tokens=num_tokens)
            self._texts[key] = self._reference.generate(prompt, params, choice)
        return self._texts[key]

    @torch.inference_mode()
    def prompt_logprobs(self, prompt: list[int]) -> list[TokenLogprobs]:
        """Of each token of the prompt but the first."""
        cache = self._reference._empty_memory(len(prompt))
        hidden = self.model.forward(self._reference._one_row(prompt, 0, cache), cache)
        num_entries = len(prompt) - 1
        if num_entries == 0:
            return []
        logits = self.model.compute_logits(hidden[:-1])
        return LogprobCopy(logits, torch.tensor(prompt[1:]), [NUM_TOP_LOGPROBS] * num_entries).entries()

    @torch.inference_mode()
    def memory(self, tokens: tuple[int, ...]) -> Memory:
        """After exactly these tokens."""
        if tokens not in self._memories:
            cache: StateCache = self._reference._empty_memory(len(tokens))
            hidden = self.model.forward(self._reference._one_row(list(tokens), 0, cache), cache)
            window = self.model.conv_width - 1
            self._memories[tokens] = Memory(
                [conv[STATE_BLOCK, :window].clone() for conv in cache.conv],
                [temporal[STATE_BLOCK] for temporal in cache.temporal],
                hidden[-1].clone(),
                [keys[1:].flatten(0, 1) for keys in cache.keys],
                [values[1:].flatten(0, 1) for values in cache.values],
            )
        return self._memories[tokens]


@functools.cache
def truth_of(model: str) -> Truth:
    """Of the model that ships, whose streams are Python; or of a small random one, whose streams are random too.

    "conv": one whose only recurrent states are conv windows.
    """
    if model == "shipped":
        sources = [inspect.getsource(importlib.import_module(name)) for name in STREAM_MODULES]
        tokenizer = load_tokenizer(default_path())
        streams = [tokenizer.encode(source, verbose=False)[:STREAM_TOKENS] for source in sources]
        return Truth(default_path(), default_model(), streams)
    rng = random.Random(0)
    streams = [[rng.randrange(3, TINY["vocab_size"]) for _ in range(STREAM_TOKENS)] for _ in STREAM_MODULES]
    folder = Path(_small_folder(model).name)
    if model == "conv":
        served.write_checkpoint(folder, served.random_model(Lfm2ForCausalLM, Lfm2Config, test_lfm2.SMALL["odd"]))
    else:
        write_checkpoint(folder, **TINY)
    cut_tokenizer(folder / "tokenizer.json", TINY["vocab_size"])
    return Truth(folder, load_model(folder, torch.float32, "cpu", show_progress=False), streams)


def cut_tokenizer(path: Path, vocab_size: int) -> None:
    """Leave the first `vocab_size` tokens, single characters all, so that a grammar asks for no other."""
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"] |= {"vocab": {text: i for text, i in vocab.items() if i < vocab_size}, "merges": []}
    path.write_text(json.dumps(tokenizer))


@functools.cache
def _small_folder(model: str) -> tempfile.TemporaryDirectory:
    """Engines read it whenever they start; gone with the process."""
    return tempfile.TemporaryDirectory(prefix=f"mambalign-{model}-")
