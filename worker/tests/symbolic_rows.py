"""What the symbolic runner keeps of a request, and of a row in flight."""

from dataclasses import dataclass, field

from mambalign.worker.batch import NewRow, ScheduledRow
from mambalign.worker.sampling_params import SamplingParams
from mambalign.worker.tests.symbolic_memory import POISON, Value, extend, states_of


@dataclass
class Text:
    """A request's text as the runner was told it, with the state after each prefix."""

    token_ids: list[int]
    states: list[int]
    params: SamplingParams
    choice: int
    num_admitted_tokens: int
    num_computed_tokens: int
    draft_token_ids: list[int] = field(default_factory=list)
    ran_decode: bool = False  # the last step was a decode row's
    left_inputs: bool = False  # the last step left inputs in place of states

    @classmethod
    def from_new_row(cls, new: NewRow, chunk_tokens: int | None) -> "Text":
        known = list(new.token_ids)
        states = states_of(known, new.num_prompt_tokens, chunk_tokens)
        return cls(known, states, new.params, new.choice, len(known), new.num_computed_tokens)

    def extend(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self.token_ids.append(token_id)
            self.states.append(extend(self.states[-1], token_id))


@dataclass
class Row:
    """One row in flight: its place in the batch, and what the step has done for it so far."""

    scheduled: ScheduledRow
    text: Text
    index: int  # in the batch
    fed: list[int] = field(default_factory=list)  # state after each token of the step, drafts right or wrong
    carry: Value = POISON  # of a prefill row with n > 0, read before the step overwrites it
    left_inputs: bool = False
    kept: list[int] = field(default_factory=list)

    @property
    def n(self) -> int:
        return self.scheduled.num_computed_tokens

    @property
    def q(self) -> int:
        return self.scheduled.num_tokens

    @property
    def num_final(self) -> int:
        return self.n + (len(self.kept) if self.scheduled.is_decode else self.q)
