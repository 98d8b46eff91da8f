"""One row driven through random steps of a symbolic runner, by the least that a scheduler must do.

It holds exactly the columns that DESIGN section 2 grants, from a pool of exactly the smallest size.
"""

import random

from mambalign.worker import mamba_columns
from mambalign.worker.batch import NewRow, ScheduledRow, SchedulerOutput
from mambalign.worker.mamba_columns import cdiv
from mambalign.worker.sampling_params import SamplingParams
from mambalign.worker.tests.symbolic_memory import SymbolicLimits, true_text
from mambalign.worker.tests.symbolic_runner import SymbolicRunner

PARAMS = SamplingParams(max_tokens=1000, seed=0)


def draw_limits(rng: random.Random, num_spec_tokens: int | None = None, block_tokens: int | None = None):
    spec = rng.randint(0, 8) if num_spec_tokens is None else num_spec_tokens
    tight = [spec + 1, spec + 1, spec + 2, spec + 3, 2 * spec + 2]
    roomy = [rng.randint(2 * spec + 2, 4 * spec + 6)] * 3  # where rows defer
    block = rng.choice(tight + roomy) if block_tokens is None else block_tokens
    max_len = rng.randint(2 * block, 4 * block + 12)
    lookahead = rng.choice([0, max(1, spec)])
    chunks = [size for size in range(2, block + 1) if block % size == 0]
    return SymbolicLimits(
        max_num_seqs=1,
        max_model_len=max_len,
        num_spec_tokens=spec,
        conv_width=rng.randint(2, 4),
        kv_block_tokens=block,
        mamba_block_tokens=block,
        num_kv_blocks=1 + cdiv(max_len + 2 * spec + 1, block),
        num_mamba_blocks=2 + max(spec + 2, 5),  # the null block, and one for a checkpoint to resume from
        num_lookahead_tokens=lookahead,
        chunk_tokens=rng.choice([None, None, *chunks]),
    )


class Driver:
    """One row's life, with preemptions and restarts from the last checkpoint."""

    def __init__(self, rng: random.Random, limits: SymbolicLimits, runner_class: type[SymbolicRunner] = SymbolicRunner):
        self.rng, self.limits = rng, limits
        self.runner = runner_class(limits, lambda request_id, num_tokens: self.plan_drafts())
        self.free = list(range(1, limits.num_mamba_blocks))
        self.kv_blocks = list(range(1, limits.num_kv_blocks))
        self.tokens = [rng.randrange(3) for _ in range(rng.randint(1, limits.max_model_len - 1))]
        self.num_prompt_tokens = len(self.tokens)
        self.checkpoint: tuple[int, int] | None = None  # boundary, block
        self.max_column = self.num_by_chunk = self.num_replayed = 0
        self.held: dict[int, int] = {}
        self.is_in_runner = False

    def plan_drafts(self) -> tuple[int, int]:
        num_drafts = self.rng.choice([self.limits.num_spec_tokens, self.rng.randint(0, self.limits.num_spec_tokens)])
        return num_drafts, self.rng.choice([num_drafts, self.rng.randint(0, num_drafts)])

    def run(self) -> None:
        self.admit()
        while len(self.tokens) < self.limits.max_model_len:
            self.step()
            if self.rng.random() < 0.05:
                self.admit()
        prompt, chunk = self.tokens[: self.num_prompt_tokens], self.limits.chunk_tokens
        expected = true_text(prompt, PARAMS, 0, 3, len(self.tokens), chunk)
        assert self.tokens[self.num_prompt_tokens :] == expected[: len(self.tokens) - self.num_prompt_tokens]
        self.runner.check_sealed()

    def admit(self) -> None:
        """Start over, from the checkpoint if there is one behind which a token is left to compute."""
        size = self.limits.mamba_block_tokens
        for column in list(self.held):
            self.release(column)
        self.n, self.c, self.drafts = 0, -1, []
        self.num_admitted = len(self.tokens)
        if self.checkpoint and self.checkpoint[0] < len(self.tokens) and self.rng.random() < 0.7:
            self.n = self.checkpoint[0]
            self.c = self.n // size - 1
            self.held[self.c] = self.checkpoint[1]
        elif self.checkpoint:  # its KV is written over
            self.free.append(self.checkpoint[1])
            self.checkpoint = None
        for block in self.kv_blocks[self.n // size :]:
            self.runner.allocated_kv(block)
        new = NewRow("r", PARAMS, 0, self.num_prompt_tokens, list(self.tokens), self.n)
        self.output = SchedulerOutput([], [new], ["r"] if self.is_in_runner else [])
        self.is_in_runner = True

    def release(self, column: int) -> None:
        block = self.held.pop(column)
        if self.checkpoint is None or self.checkpoint[1] != block:
            self.free.append(block)

    def columns(self, q: int) -> set[int]:
        """What a decode row of q tokens must hold."""
        size, spec = self.limits.mamba_block_tokens, self.limits.num_spec_tokens
        return set(mamba_columns.decode_columns(self.n, self.c, q, size, spec))

    @property
    def by_chunk(self) -> bool:
        return self.limits.chunk_tokens is not None and self.n < self.num_prompt_tokens

    @property
    def may_keep(self) -> bool:
        """With chunks, nothing that covers a token of the reply is kept."""
        return self.limits.chunk_tokens is None or self.n < self.num_prompt_tokens

    def piece_end(self, most: int) -> int:
        """By chunks a piece ends with one, or with the prompt."""
        chunk = self.limits.chunk_tokens
        return min(self.num_prompt_tokens, self.n + cdiv(most, chunk) * chunk) if self.by_chunk else self.n + most

    def step(self) -> None:
        size, rng, known = self.limits.mamba_block_tokens, self.rng, len(self.tokens)
        is_decode = self.n == known - 1 and self.n >= self.num_admitted
        boundaries: list[int] = []
        if is_decode:
            tokens = [self.tokens[-1], *self.drafts]
            columns = self.columns(len(tokens))
        else:
            tokens = self.tokens[self.n : self.piece_end(rng.choice([1, rng.randint(1, size), known]))]
            self.num_by_chunk += self.by_chunk
            self.num_replayed += not self.may_keep
            possible = [m for m in range(size, self.n + len(tokens) + 1, size) if m > self.n]
            boundaries = sorted(rng.sample(possible, rng.randint(0, min(3, len(possible))) * self.may_keep))
            columns = {m // size - 1 for m in boundaries}
            columns.add(mamba_columns.next_column(self.c, self.n, len(tokens), size))
        for column in sorted(columns - set(self.held)):
            self.held[column] = self.free.pop(0)
            self.runner.allocated_state(self.held[column])
        self.max_column = max(self.max_column, *self.held)
        end = self.n + len(tokens)
        after = self.tokens[end] if end < known and not is_decode else None
        held = dict(self.held)
        row = ScheduledRow("r", 0, self.n, tokens, is_decode, self.kv_blocks, held, boundaries, after, self.by_chunk)
        self.output.rows.append(row)
        self.book(row)

    def book(self, row: ScheduledRow) -> None:
        size = self.limits.mamba_block_tokens
        (result,) = self.runner.execute_model(self.output).results
        self.output = SchedulerOutput([])
        self.c = mamba_columns.next_column(self.c, self.n, row.num_tokens, size)
        self.n += len(result.token_ids) if row.is_decode else row.num_tokens
        self.tokens += result.token_ids
        self.drafts = result.draft_token_ids
        last = self.n // size * size
        crossed = [last] if row.is_decode and self.may_keep and last > row.num_computed_tokens else []
        for boundary in row.boundaries + crossed:
            self.keep(boundary)
        for column in [k for k in self.held if self.is_behind(k)]:
            self.release(column)

    def is_behind(self, column: int) -> bool:
        return column < self.n // self.limits.mamba_block_tokens and column != self.c

    def keep(self, boundary: int) -> None:
        """Publish a boundary's state, in place of the checkpoint before."""
        block = self.held[boundary // self.limits.mamba_block_tokens - 1]
        self.runner.seal_state(block, self.runner.texts["r"].states, boundary)
        old, self.checkpoint = self.checkpoint, (boundary, block)
        if old and old[1] not in self.held.values() and old[1] != block:
            self.free.append(old[1])


def run_seeds(num_seeds: int, runner_class=SymbolicRunner, driver_class=Driver, **options: int) -> list[Driver]:
    drivers = []
    for seed in range(num_seeds):
        rng = random.Random(seed)
        driver = driver_class(rng, draw_limits(rng, **options), runner_class)
        drivers.append(driver)
        driver.run()
    return drivers
