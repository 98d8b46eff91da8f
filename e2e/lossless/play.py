"""Runs a plan on its engine and compares everything that can be compared. An AssertionError is a difference found."""

from dataclasses import dataclass, field

from lossless.expected import Expected, expect
from lossless.plan import Plan
from lossless.tally import Tally
from lossless.truth import Truth, truth_of
from lossless.watched_engine import WatchedEngine

from mambalign.engine.messages import EngineOutput, EngineRequest
from mambalign.worker.sampling_params import TokenLogprobs

MAX_STEPS = 5000


@dataclass
class Answer:
    """All that came for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    text: str = ""
    last: EngineOutput | None = None  # the output that ended it

    def add(self, output: EngineOutput) -> None:
        assert self.last is None, f"{output.request_id} gets an output after its end"
        self.token_ids += output.new_token_ids
        self.text += output.new_text
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, f"{output.request_id} gets its prompt's log-probabilities twice"
            self.prompt_logprobs = output.prompt_logprobs
        if output.new_logprobs is not None:
            self.logprobs = (self.logprobs or []) + output.new_logprobs
        if output.finish_reason:
            self.last = output


class Play:
    """One plan on its way."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.truth: Truth = truth_of(plan.setup.model)
        self.asks = expect(plan, self.truth)
        self.requests = {expected.name: expected for choices in self.asks for expected in choices}
        self.answers = {name: Answer() for name in self.requests}
        self.engine = WatchedEngine(plan.setup, self._drafts)
        self._started: dict[int, int] = {}  # ask -> step
        self._aborted: set[str] = set()
        self._num_resets = 0

    def _drafts(self, name: str, num_tokens: int) -> list[int]:
        return self.requests[name].drafts(num_tokens, self.plan.setup.spec_tokens, self.truth.model.vocab_size)

    def run(self) -> Tally:
        """To the end of the last request; returns what the run went through."""
        core, step = self.engine.core, 0
        while len(self._started) < len(self.asks) or core.has_work():
            if not core.has_work():
                waiting = [ask.start for i, ask in enumerate(self.plan.asks) if i not in self._started]
                step = max(step, min(waiting))
            self._interfere(step)
            for output in self.engine.step():
                self.answers[output.request_id].add(output)
            step += 1
            assert self.engine.num_steps < MAX_STEPS, "no end in sight"
        self.engine.check_idle()
        for expected in self.requests.values():
            self._check(expected, self.answers[expected.name])
        return self._tally()

    def _interfere(self, step: int) -> None:
        """What happens before a step: arrivals, aborts, resets."""
        core = self.engine.core
        for number, (ask, choices) in enumerate(zip(self.plan.asks, self.asks, strict=True)):
            if number not in self._started and ask.start <= step:
                self._started[number] = step
                for expected in choices:
                    core.add_request(self._request(expected))
            if number in self._started and ask.abort_after is not None:
                for expected in choices if step - self._started[number] == ask.abort_after else ():
                    if self.answers[expected.name].last is None:
                        self._aborted.add(expected.name)
                        core.abort(expected.name)
        if step in self.plan.resets:
            self._num_resets += 1
            was_empty = not core.scheduler.running
            assert core.reset_prefix_cache() == was_empty
            core.check()

    def _request(self, expected: Expected) -> EngineRequest:
        return EngineRequest(
            expected.name,
            expected.prompt,
            expected.params,
            choice=expected.choice,
            cache_salt=expected.ask.salt,
        )

    def _check(self, expected: Expected, answer: Answer) -> None:
        name, last, num_tokens = expected.name, answer.last, len(answer.token_ids)
        assert last is not None, f"{name} has no ending"
        wanted = expected.endless.token_ids[:num_tokens]
        assert answer.token_ids == wanted, f"{name} after {len(expected.prompt)}: {answer.token_ids}, must be {wanted}"
        self._check_ending(expected, answer, last)
        self._check_logprobs(expected, answer)
        assert last.num_cached_tokens == self.engine.hits.get(name, 0), f"{name}: cached {last.num_cached_tokens}"
        drafts = (last.num_draft_tokens, last.num_accepted_tokens)
        assert drafts == self.engine.drafts_of_request.get(name, (0, 0)), f"{name}: drafts {drafts}"

    def _check_ending(self, expected: Expected, answer: Answer, last: EngineOutput) -> None:
        name, ending, num_tokens = expected.name, expected.ending, len(answer.token_ids)
        if name in self._aborted:
            assert last.finish_reason == "abort" and num_tokens <= ending.num_tokens, f"{name}: {last.finish_reason}"
            text = self.truth.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        else:
            told, text = (num_tokens, last.finish_reason, last.stop_reason), ending.text
            must = (ending.num_tokens, ending.finish_reason, ending.stop_reason)
            assert told == must, f"{name} ends by {told}, must by {must}"
        assert answer.text == text, f"{name}: text {answer.text!r}, must be {text!r}"

    def _check_logprobs(self, expected: Expected, answer: Answer) -> None:
        name, num_tokens = expected.name, len(answer.token_ids)
        if expected.ask.logprobs and num_tokens:
            assert answer.logprobs is not None and len(answer.logprobs) == num_tokens, f"{name}: log-probabilities"
            for at, (got, wanted) in enumerate(zip(answer.logprobs, expected.endless.logprobs, strict=False)):
                assert got == wanted, f"{name}: log-probabilities of token {at} are {got}, must be {wanted}"
        else:
            assert answer.logprobs is None, name
        wants_prompt = expected.ask.prompt_logprobs and num_tokens > 0
        of_prompt = self.truth.prompt_logprobs(expected.prompt) if wants_prompt else None
        assert answer.prompt_logprobs == of_prompt, f"{name}: log-probabilities of its prompt"

    def _tally(self) -> Tally:
        engine, setup = self.engine, self.plan.setup
        num_tokens = sum(len(answer.token_ids) for answer in self.answers.values())
        lengths = {name: len(expected.prompt) for name, expected in self.requests.items()}
        lacking = {name: expected for name, expected in self.requests.items() if expected.ask.prompt_logprobs}
        held = [name for name, expected in self.requests.items() if expected.ask.grammar]
        not_looked_up = {name for name, expected in lacking.items() if len(expected.prompt) > 1}
        engine.check_counters(lengths, not_looked_up, num_tokens)
        tally = Tally(
            runs=1,
            requests=len(self.requests),
            tokens=num_tokens,
            steps=engine.num_steps,
            steps_ahead=engine.num_ahead,
            prompt_logprobs=sum(answer.prompt_logprobs is not None for answer in self.answers.values()),
            grammars=len(held),
            grammar_drafts=sum(engine.drafts_of_request.get(name, (0, 0))[1] for name in held),
            hits=sum(hit > 0 for hit in engine.hits.values()),
            hit_tokens=sum(engine.hits.values()),
            preemptions=engine.num_preemptions,
            aborts=len(self._aborted),
            resets=self._num_resets,
            cut_rows=engine.num_cut_rows,
            discarded=engine.num_discarded,
            drafts=engine.num_drafts,
            accepted=engine.num_accepted,
            replays=engine.num_replays,
            states=engine.published.num_states,
            kv_blocks=engine.published.num_kv_blocks,
        )
        place = (setup.runner, setup.layout)
        for bias, count in engine.moves.items():
            tally.crossings[(*place, bias)] += count
        for bias, count in engine.published.watch.crossings.items():
            tally.kept[(*place, bias)] += count
        tally.endings.update(answer.last.finish_reason for answer in self.answers.values())
        tally.see(setup)
        return tally


def play(plan: Plan) -> Tally:
    """Run a plan. Raises AssertionError for what differs, or whatever the engine raises."""
    return Play(plan).run()
