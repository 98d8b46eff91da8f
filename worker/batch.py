"""What the scheduler asks of a model runner for one step, and what the runner answers. Torch-free."""

from dataclasses import dataclass, field
from typing import NamedTuple

from mambalign.worker.mamba_columns import PrecopyInfo
from mambalign.worker.sampling_params import SamplingParams

UNKNOWN_TOKEN = -1  # V2: sampled by the step in flight, or drafted; it is on the device


@dataclass(frozen=True)
class NewRow:
    """A request that enters (or re-enters, after preemption) the runner."""

    request_id: str
    params: SamplingParams
    choice: int
    num_prompt_tokens: int
    token_ids: list[int]  # all known tokens: the prompt, and the output so far when resumed
    num_computed_tokens: int  # tokens restored from the prefix cache, a multiple of B


@dataclass(frozen=True)
class ScheduledRow:
    """One request's part of a step: run `token_ids`, which start at position `num_computed_tokens`.

    A decode row runs its last sampled token and then its drafts; a prefill row a piece of its known tokens.
    """

    request_id: str
    admission: int  # the request's stay in the runner that this row belongs to
    num_computed_tokens: int  # n; of a decode row scheduled ahead, the lowest it can be: the device knows
    token_ids: list[int]  # q tokens; UNKNOWN_TOKEN where only the device knows them
    is_decode: bool
    kv_blocks: list[int]  # every KV block that the row holds, in order
    mamba_blocks: dict[int, int]  # column -> block id, every column that the row holds
    boundaries: list[int]  # prefill: absolute boundaries in (n, n+q] whose state is asked for
    next_token_id: int | None  # prefill that ends before the known tokens do: the known token after the piece
    by_chunk: bool = False  # a piece of the prompt, from a multiple of a chunk on, that is scanned by chunks

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def samples(self) -> bool:
        return self.next_token_id is None

    @property
    def num_samples(self) -> int:
        """A decode row samples after each of its tokens, a prompt after its last."""
        return self.num_tokens if self.is_decode else int(self.samples)


@dataclass
class SchedulerOutput:
    """One step. Rows of requests in `removed` leave the runner before `new_rows` enter."""

    rows: list[ScheduledRow]
    new_rows: list[NewRow] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)  # finished, aborted or preempted since the last step
    mamba_precopy_info: list[PrecopyInfo] | None = None  # one a row, in batch order; filled by preprocess_mamba


@dataclass
class RowResult:
    """What a step did for one row."""

    request_id: str
    token_ids: list[int]  # sampled and kept: 1..S+1 for a decode row, 1 for a finished prefill, else none
    logprobs: list | None  # TokenLogprobs, one per token, when asked for
    draft_token_ids: list[int]  # proposed for the row's next step
    num_draft_tokens: int  # drafts that this step verified
    prompt_logprobs: list = field(default_factory=list)  # TokenLogprobs of the prompt's tokens n+1 .. n+q, if asked for
    error: str | None = None  # why the request cannot go on; its tokens do not count then


class CopyTotals(NamedTuple):
    """State copies of a runner since start, in rows."""

    precopies: int = 0  # moved before a forward pass
    precopies_biased: int = 0  # of those, with a token bias > 0
    postcopies: int = 0  # kept a boundary state after sampling

    def plus(self, precopies: int, precopies_biased: int, postcopies: int) -> "CopyTotals":
        new = (precopies, precopies_biased, postcopies)
        return CopyTotals(*(a + b for a, b in zip(self, new, strict=True)))


@dataclass
class RunnerOutput:
    """Results in the order of `SchedulerOutput.rows`."""

    results: list[RowResult]
    mismatches: tuple = ()  # fused_copy_check.Mismatch of this step, when it was checked

    def result(self) -> "RunnerOutput":
        """What a launched step gives when asked for its result; this one is there already."""
        return self
