"""What each request of a plan must get, worked out before anything runs: prompt, whole text, and where it ends."""

from dataclasses import dataclass

import msgspec
from lossless.plan import Ask, Plan, Stop, base_params
from lossless.truth import Truth
from tokenizers import Tokenizer

from mambalign.engine.reference import Generation
from mambalign.worker.sampling_params import SamplingParams


@dataclass(frozen=True)
class Ending:
    """How a text ends that nobody aborts."""

    num_tokens: int
    finish_reason: str
    stop_reason: int | str | None
    text: str


@dataclass(frozen=True)
class Expected:
    """One choice of an ask. `endless` goes on behind the ending, further than any draft looks."""

    name: str  # request id
    ask: Ask
    choice: int
    prompt: list[int]
    params: SamplingParams
    endless: Generation
    ending: Ending

    def drafts(self, num_tokens: int, num_spec_tokens: int, vocab_size: int) -> list[int]:
        """By the ask's script, what is proposed to follow the first `num_tokens` tokens of prompt and text."""
        num_drafts, num_right = self.ask.script[num_tokens % len(self.ask.script)]
        at = num_tokens - len(self.prompt)
        true = self.endless.token_ids[at : at + min(num_drafts, num_spec_tokens)]
        return [token if i < num_right else (token + 1) % vocab_size for i, token in enumerate(true)]


def expect(plan: Plan, truth: Truth) -> list[list[Expected]]:
    """Per ask, its choices. Prompts too long for the engine are cut."""
    known: list[list[Expected]] = []
    for number, ask in enumerate(plan.asks):
        prompt: list[int] = []
        if ask.turn_of is not None and ask.turn_of < len(known):
            earlier = known[-1 - ask.turn_of][0]
            prompt = earlier.prompt + earlier.endless.token_ids[: earlier.ending.num_tokens]
        for piece in ask.pieces:
            prompt = prompt + truth.streams[piece.stream][: piece.num_tokens]
        prompt = prompt[: plan.setup.max_model_len - 1]
        params = base_params(ask)
        limit = min(ask.max_tokens, plan.setup.max_model_len - len(prompt))
        if ask.stop is not None:
            whole = truth.text(prompt, params, 0, limit).token_ids[:limit]
            params = msgspec.structs.replace(params, **stop_of(ask.stop, whole, truth.tokenizer))
        choices = []
        for choice in range(ask.n):
            endless = truth.text(prompt, params, choice, limit + plan.setup.spec_tokens + 1)
            ending = ending_of(endless.token_ids[:limit], params, truth)
            choices.append(Expected(f"{number}-{choice}", ask, choice, prompt, params, endless, ending))
        known.append(choices)
    return known


def stop_of(stop: Stop, whole: list[int], tokenizer: Tokenizer) -> dict[str, list]:
    """The sampling parameter that ends the text `whole` where `stop` says; none where it has no such place."""
    if stop.num_characters == 0:
        return {"stop_token_ids": [whole[stop.at % len(whole)]]}
    text = tokenizer.decode(whole, skip_special_tokens=True)
    piece = text[stop.at : stop.at + stop.num_characters]
    return {"stop": [piece]} if piece and "\ufffd" not in piece else {}


def ending_of(token_ids: list[int], params: SamplingParams, truth: Truth) -> Ending:
    """Token by token, as if they had come one at a time; `token_ids` are all that the length allows."""
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(truth.model.eos_token_ids))

    def decode(num_tokens: int) -> str:
        return truth.tokenizer.decode(token_ids[:num_tokens], skip_special_tokens=params.skip_special_tokens)

    for i, token_id in enumerate(token_ids):
        if i + 1 >= params.min_tokens and token_id in ends:
            is_eos = token_id in truth.model.eos_token_ids and not params.ignore_eos
            return Ending(i + 1, "stop", None if is_eos else token_id, decode(i))
        text = decode(i + 1)
        for stop in params.stop:
            if stop in text:
                return Ending(i + 1, "stop", stop, text[: text.index(stop)])
    return Ending(len(token_ids), "length", None, decode(len(token_ids)))
