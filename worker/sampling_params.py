"""What a request may ask of the sampler, and the shape of the log-probabilities it gets back; no torch."""

import math
from typing import Any, Literal

import msgspec

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_STOP_CHARACTERS = 1024  # of one stop string
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024  # tokens with a bias
MAX_GRAMMAR_CHARS = 1 << 18
MAX_TOP_K = 2**31 - 1  # no vocabulary has more
MAX_TEMPERATURE = 2.0
MIN_SAMPLING_TEMPERATURE = 1e-5  # below it the noise could no longer change the order: taken as greedy


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log, of the unmodified logits, fp32) at one position."""

    logprob: float  # of the token that was taken, or stands there in the prompt
    top_ids: list[int]  # best first, ties to the lowest id
    top_logprobs: list[float]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the text must be: one of the first five. It ends where it can go no further, or where the model ends it."""

    json: dict[str, Any] | bool | str | None = None  # JSON schema, or its text
    json_object: bool | None = None  # true: any JSON object
    regex: str | None = None  # of the whole text; Rust's syntax
    choice: list[str] | None = None  # one of these texts
    grammar: str | None = None  # Lark (of llguidance) or GBNF
    reasoning: Literal["inside", "before"] | None = None  # the text ends, or may begin with, a free <think> part first
    calls: str | None = None  # Lark: of tool calls, which may come instead
    field: str = "structured_outputs"  # of the request, for errors

    def validate(self) -> None:
        """Raises ValueError that names the field."""
        forms = ("json", "json_object", "regex", "choice", "grammar")
        given = [name for name in forms if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{self.field} must hold exactly one of {', '.join(forms)}, got {len(given)}")
        if self.json_object is False:
            raise ValueError(f"{self.field}.json_object must be true or left out, got False")
        if self.choice is not None and (not self.choice or "" in self.choice):
            raise ValueError(f"{self.field}.choice must hold texts that are not empty, got {self.choice!r}")
        num_chars = len(msgspec.json.encode(self))
        if num_chars > MAX_GRAMMAR_CHARS:
            raise ValueError(f"{self.field} must be at most {MAX_GRAMMAR_CHARS} characters of JSON, got {num_chars}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen and when it ends, under the names of the HTTP fields.

    The sampler applies them in this order: `logit_bias`, `repetition_penalty`, `frequency_penalty` and
    `presence_penalty`, the `min_tokens` mask, that of `structured_outputs`, `temperature`, `min_p`, `top_k`, `top_p`.
    The constructor takes None for an empty list or dict, and a plain string for `stop`; nothing is checked before
    `validate`.
    """

    max_tokens: int = 16  # tokens generated at most
    min_tokens: int = 0  # before so many, no end-of-text, stop token or stop string ends the text
    temperature: float = 1.0  # 0..2; 0 = greedy
    top_p: float = 1.0  # smallest set of best tokens with this mass, of what top_k and min_p left; > 0; 1 = off
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0  # of the best token's probability; 0 = off
    seed: int | None = None  # None: whoever takes the request in chooses one
    presence_penalty: float = 0.0  # -2..2, subtracted once from each token of the output
    frequency_penalty: float = 0.0  # -2..2, subtracted per occurrence in the output
    repetition_penalty: float = 1.0  # > 0, over prompt and output; 1 = off
    logit_bias: dict[int, float] = {}  # token id -> -100..100
    logprobs: int | None = None  # alternatives returned per token, 0..20; None = no log-probabilities
    prompt_logprobs: int | None = None  # the same for the prompt's tokens; then the prefix cache is not looked up
    stop: list[str] = []  # at most 16 of 1024 characters; not part of the text
    stop_token_ids: list[int] = []  # end the text; part of the token ids, not of the text
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # leave special tokens out of the text, and out of sight of stop strings
    structured_outputs: StructuredOutputs | None = None  # every token is one that leads to such a text
    n: int = 1  # choices, 1..128; split into one request per choice before the engine

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        for field, empty in (("stop", []), ("stop_token_ids", []), ("logit_bias", {})):
            if getattr(self, field) is None:
                msgspec.structs.force_setattr(self, field, empty)

    @property
    def is_greedy(self) -> bool:
        """The best token is taken, after bias and penalties; no noise is drawn."""
        return self.temperature < MIN_SAMPLING_TEMPERATURE

    @property
    def needs_history(self) -> bool:
        """The token depends on which tokens came before (beyond their number)."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def needs_host(self) -> bool:
        """The host must know every token before this one, beyond their number."""
        return self.needs_history or self.structured_outputs is not None

    @property
    def changes_logits(self) -> bool:
        """Logits are modified before the choice: bias, penalties, the `min_tokens` mask or a grammar's."""
        return bool(self.logit_bias) or self.min_tokens > 0 or self.needs_host

    @property
    def is_plain_greedy(self) -> bool:
        """The token is the argmax of the model's logits and nothing else is asked for."""
        return self.is_greedy and self.logprobs is None and not self.changes_logits

    def validate(self, vocab_size: int) -> None:
        """Check every field against its limits, for a model with logits over `vocab_size` token ids.

        Raises:
            ValueError: the text starts with the field's name and tells the limit and the value given.
        """
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens ({self.max_tokens})"
            raise ValueError(f"min_tokens must be {limit}, got {self.min_tokens}")
        _check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p must be greater than 0, got 0; for the best token alone: temperature 0")
        _check_int("top_k", self.top_k, -1, MAX_TOP_K)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        _check_float("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_float("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_float("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0.0:
            raise ValueError(f"repetition_penalty must be greater than 0, got {self.repetition_penalty}")
        self._validate_logit_bias(vocab_size)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._validate_stops(vocab_size)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        _check_int("n", self.n, 1, MAX_CHOICES)
        self._validate_structured_outputs()

    def _validate_structured_outputs(self) -> None:
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputs):
            raise ValueError(f"structured_outputs must be StructuredOutputs, got {self.structured_outputs!r}")
        self.structured_outputs.validate()
        name = self.structured_outputs.field
        if self.min_tokens > 0:
            raise ValueError(f"min_tokens cannot be used with {name}, which says where the text ends: leave it out")
        if self.ignore_eos:
            raise ValueError(f"ignore_eos cannot be used with {name}, which says where the text ends: leave it out")

    def _validate_logit_bias(self, vocab_size: int) -> None:
        if not isinstance(self.logit_bias, dict):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ValueError(f"logit_bias must hold at most {MAX_LOGIT_BIASES} tokens, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias token id", token_id, 0, vocab_size - 1)
            _check_float(f"logit_bias of token {token_id}", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)

    def _validate_stops(self, vocab_size: int) -> None:
        if not isinstance(self.stop, list) or not all(isinstance(text, str) for text in self.stop):
            raise ValueError(f"stop must be a list of strings, got {self.stop!r}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        if "" in self.stop:
            raise ValueError("stop must not hold an empty string, got ''")
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise ValueError(f"stop strings must have at most {MAX_STOP_CHARACTERS} characters, got {longest}")
        if not isinstance(self.stop_token_ids, list):
            raise ValueError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids must hold at most {MAX_STOP_TOKEN_IDS}, got {len(self.stop_token_ids)}")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids entry", token_id, 0, vocab_size - 1)


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    limit = f"at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer {limit}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {limit}, got {value}")


def _check_float(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    if not low <= value <= high:
        limit = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be {limit}, got {value:g}")
