"""A run of the proof as plain data: one engine and the traffic that it gets. A line of JSON replays it."""

from typing import Any, Literal

import msgspec
from cells import pool_memory

from mambalign.engine.capacity import states_for_one
from mambalign.worker.mamba_columns import cdiv
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.sampling_params import SamplingParams, StructuredOutputs

NUM_TOP_LOGPROBS = 2


class Setup(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine. Pools are given by what they have above the smallest that start-up takes."""

    model: Literal["tiny", "shipped", "conv"] = "tiny"
    runner: Literal["v1", "v2"] = "v1"
    layout: Literal["SD", "DS"] = "SD"
    block_tokens: int = 16  # B
    kv_block_tokens: int = 16
    spec_tokens: int = 0  # S
    spec_method: Literal["mtp", "ngram"] = "mtp"
    scripted: bool = False  # drafts are those of each ask's `script`, whatever the method proposes
    step_tokens: int = 8192  # budget of a step
    rows: int = 8  # requests that run at once
    max_model_len: int = 512
    spare_states: int = 64
    spare_kv_blocks: int = 64
    prefix_caching: bool = True
    checked: bool = True  # --check-fused-copy
    late: bool = False  # V2: each step runs when its result is asked for

    def options(self, model: HybridModel) -> dict[str, Any]:
        """As `EngineConfig.from_options` takes them."""
        ahead = 2 if self.runner == "v2" else 1
        lookahead = max(1, self.spec_tokens) if self.spec_tokens and self.spec_method == "mtp" else 0
        longest = cdiv(self.max_model_len + ahead * self.spec_tokens + lookahead, self.kv_block_tokens)
        num_states = states_for_one(self.spec_tokens, self.runner == "v2") + self.spare_states
        num_kv_blocks = longest + self.spare_kv_blocks
        return {
            "dtype": "float32",
            "device": "cpu",
            "runner": self.runner,
            "mamba_conv_layout": self.layout,
            "mamba_block_size": self.block_tokens,
            "kv_block_size": self.kv_block_tokens,
            "spec_tokens": self.spec_tokens,
            "spec_method": self.spec_method,
            "max_num_batched_tokens": self.step_tokens,
            "max_num_seqs": self.rows,
            "max_model_len": self.max_model_len,
            "enable_prefix_caching": self.prefix_caching,
            "check_fused_copy": self.checked,
            **pool_memory(model, self.spec_tokens, self.spec_method, self.kv_block_tokens, num_states, num_kv_blocks),
        }


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first `num_tokens` of an endless stream. Prompts that begin with one stream share its beginning."""

    stream: int = 0
    num_tokens: int = 1


class Stop(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ends a text at a place that its true text says: by the token there, or by the characters from there on."""

    at: int = 0  # tokens into the output (for a string, characters)
    num_characters: int = 0  # of a stop string; 0: a stop token


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request. Drafts that follow a text of L tokens: `script[L % len]`, (how many, how many of them right)."""

    pieces: tuple[Piece, ...] = (Piece(),)
    turn_of: int | None = None  # begins with the prompt and text of that earlier ask (counted back, 0: the last one)
    max_tokens: int = 8
    style: str = "greedy"  # of STYLES
    seed: int = 0
    n: int = 1
    logprobs: bool = True
    prompt_logprobs: bool = False
    stop: Stop | None = None
    min_tokens: int = 0
    ignore_eos: bool = True
    grammar: str | None = None  # of GRAMMARS: the text follows it, until it ends
    salt: str = ""
    start: int = 0  # steps after the beginning of the run
    abort_after: int | None = None  # steps after its start
    script: tuple[tuple[int, int], ...] = ((8, 8),)


# How the next token is taken.
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "nucleus": {"temperature": 1.2, "top_p": 0.9, "top_k": 20},
    "repetition": {"repetition_penalty": 1.3},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {5: 4.0, 11: -100.0}},
}


# What a text must be. Most end before the longest reply does.
GRAMMARS: dict[str, StructuredOutputs] = {
    "schema": StructuredOutputs(
        json={
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": -9, "maximum": 99},
                "on": {"type": "boolean"},
                "as": {"type": "array", "items": {"enum": ["x", None]}, "minItems": 1, "maxItems": 4},
            },
            "required": ["n", "on", "as"],
            "additionalProperties": False,
        }
    ),
    "regex": StructuredOutputs(regex=r"[a-z_]{2,9}(\.[a-z]{1,5})*\([0-9a-f]{0,4}\)"),
}


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Asks in the order of their arrival among those of one step; the prefix cache is reset before `resets` steps."""

    setup: Setup = Setup()
    asks: tuple[Ask, ...] = ()
    resets: tuple[int, ...] = ()

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        return msgspec.json.decode(text, type=cls)


def base_params(ask: Ask) -> SamplingParams:
    """Sampling parameters but for what depends on the ask's text: its stops."""
    return SamplingParams(
        **{"temperature": 0.0, **STYLES[ask.style]},
        max_tokens=ask.max_tokens,
        min_tokens=0 if ask.grammar else min(ask.min_tokens, ask.max_tokens),
        seed=ask.seed,
        n=ask.n,
        logprobs=NUM_TOP_LOGPROBS if ask.logprobs else None,
        prompt_logprobs=NUM_TOP_LOGPROBS if ask.prompt_logprobs else None,
        ignore_eos=ask.ignore_eos and not ask.grammar,
        structured_outputs=GRAMMARS[ask.grammar] if ask.grammar else None,
    )
