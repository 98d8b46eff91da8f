"""An oracle in the shape of a model runner: memory holds no numbers, but the exact text that each value is made of.

The runner follows DESIGN section 2 on the names of `symbolic_memory` and asserts at every read that the value is the
one for exactly that position of exactly that request's text (law 5), and at every write that the block is the row's
alone, not published and not the null block (laws 1 and 4). A decode row that may defer leaves the inputs of its drafts
in the places of their states, where only the replay of its next step may find them. The text that the runner must
produce is known beforehand.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from mambalign.kernels.rows import may_defer
from mambalign.worker.batch import UNKNOWN_TOKEN, RowResult, RunnerOutput, ScheduledRow, SchedulerOutput
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import NULL_BLOCK, PostcopyInfo, PrecopyInfo, cdiv, postcopy, precopy, table_width
from mambalign.worker.tests.symbolic_memory import (
    POISON,
    ZERO,
    Inputs,
    Memory,
    SymbolicLimits,
    Value,
    extend,
    true_token,
)
from mambalign.worker.tests.symbolic_rows import Row, Text

DraftPlan = Callable[[str, int], tuple[int, int]]  # (request id, tokens of its text) -> (drafts, how many are right)


class SymbolicRunner:
    """`execute_model` as the V1 runner's. `draft_plan` says how many drafts a row gets, and how many of them are right.

    The owner of the pools tells it when a block is handed out (`allocated_kv`, `allocated_state`) and when one is
    published (`seal_kv`, `seal_state`).
    """

    def __init__(self, limits: SymbolicLimits, draft_plan: DraftPlan):
        self.limits = limits
        self.draft_plan = draft_plan
        width = table_width(limits.max_model_len, limits.mamba_block_tokens, limits.num_spec_tokens)
        self.batch = InputBatch(limits.max_num_seqs, width, limits.mamba_block_tokens)
        self.memory = Memory(limits)
        self.texts: dict[str, Text] = {}
        self.sealed_kv: dict[int, tuple[Value, ...]] = {}  # published block -> its contents then
        self.sealed_states: dict[int, tuple[Value, ...]] = {}
        self.precopies: dict[str, PrecopyInfo] = {}  # of the last step, rows that moved
        self.postcopies: dict[str, PostcopyInfo] = {}
        self.spans: dict[str, tuple[int, int]] = {}  # of the last step, n before and after
        self.num_precopies = self.num_biased_precopies = self.num_postcopies = 0  # since start
        self.num_replays = 0  # tokens
        self.turns: Counter[tuple[bool, bool]] = Counter()  # of decode steps: the one before left inputs, this one does

    # what the owner of the pools tells

    def allocated_kv(self, block: int) -> None:
        self.sealed_kv.pop(block, None)
        self.memory.poison_kv(block)

    def allocated_state(self, block: int) -> None:
        self.sealed_states.pop(block, None)
        self.memory.poison_state(block)

    def seal_kv(self, block: int, states: list[int], num_tokens: int) -> None:
        """The block was published as the last of a prefix of `num_tokens` tokens; `states` are the prefix's states."""
        expected = states[num_tokens - self.limits.kv_block_tokens + 1 : num_tokens + 1]
        assert self.memory.kv[block] == expected, f"published KV block {block} is not that of the prefix"
        if self.limits.num_lookahead_tokens:
            first = int(num_tokens == self.limits.kv_block_tokens)  # the text's slot 0 has no input
            assert self.memory.drafter[block][first:] == expected[first:], f"hole in published drafter block {block}"
        self.sealed_kv.setdefault(block, self.memory.contents_of_kv(block))

    def seal_state(self, block: int, states: list[int], num_tokens: int) -> None:
        memory, width = self.memory, self.limits.conv_width
        assert memory.temporal[block] == states[num_tokens], f"published state {block} is not at {num_tokens}"
        assert memory.carry[block] == states[num_tokens], f"published carry {block} is not at {num_tokens}"
        assert memory.conv[block][: width - 1] == self._window(states, num_tokens), f"published conv {block} is wrong"
        self.sealed_states.setdefault(block, memory.contents_of_state(block))

    def check_sealed(self) -> None:
        """Law 1: what was published is still the same."""
        for block, contents in self.sealed_kv.items():
            assert self.memory.contents_of_kv(block) == contents, f"published KV block {block} has changed"
        for block, contents in self.sealed_states.items():
            assert self.memory.contents_of_state(block) == contents, f"published state {block} has changed"

    # a step

    def execute_model(self, scheduled: SchedulerOutput) -> RunnerOutput:
        self._take_over(scheduled)
        rows = [self._enter(row) for row in scheduled.rows]
        self._share_out(rows)
        scheduled.mamba_precopy_info = [self._move(row) for row in rows]
        for row in rows:
            self._forward_kv(row)
            if row.scheduled.is_decode:
                self._forward_decode(row)
            else:
                self._forward_prefill(row)
        for row in rows:
            self._sample(row)
        for row in rows:
            self._keep_boundary(row)
        self.num_precopies += len(self.precopies)
        self.num_biased_precopies += sum(info.token_bias > 0 for info in self.precopies.values())
        self.num_postcopies += len(self.postcopies)
        return RunnerOutput([self._finish(row) for row in rows])

    def _take_over(self, scheduled: SchedulerOutput) -> None:
        self.precopies, self.postcopies, self.spans = {}, {}, {}
        for request_id in scheduled.removed:
            self.batch.remove(request_id)
            del self.texts[request_id]
        for new in scheduled.new_rows:
            assert new.num_computed_tokens % self.limits.mamba_block_tokens == 0
            self.batch.add(new)
            self.texts[new.request_id] = Text.from_new_row(new, self.limits.chunk_tokens)
        scheduled.rows.sort(key=lambda row: self.batch.row_of[row.request_id])

    def _enter(self, scheduled: ScheduledRow) -> Row:
        """Take a row in, after holding its description against what the runner knows of its text."""
        text = self.texts[scheduled.request_id]
        if self.limits.schedules_ahead and scheduled.is_decode:
            scheduled = self._fill_in(scheduled, text)
        n, known = scheduled.num_computed_tokens, len(text.token_ids)
        end = n + scheduled.num_tokens
        assert n == text.num_computed_tokens < known and scheduled.num_tokens >= 1
        assert scheduled.is_decode == (n == known - 1 and n >= text.num_admitted_tokens)
        if scheduled.is_decode:
            assert scheduled.token_ids[0] == text.token_ids[-1]
            assert scheduled.num_tokens <= 1 + self.limits.num_spec_tokens and not scheduled.boundaries
        else:
            assert scheduled.token_ids == text.token_ids[n:end]
        expected_next = text.token_ids[end] if end < known and not scheduled.is_decode else None
        assert scheduled.next_token_id == expected_next
        assert all(n < m <= end and m % self.limits.mamba_block_tokens == 0 for m in scheduled.boundaries)
        assert len(scheduled.mamba_blocks) <= self._max_held(scheduled, text), f"holds {sorted(scheduled.mamba_blocks)}"
        positions = len(scheduled.kv_blocks) * self.limits.kv_block_tokens
        assert end + self.limits.num_lookahead_tokens <= positions, "KV slots missing"
        return Row(scheduled, text, self.batch.set_blocks(scheduled))

    def _fill_in(self, scheduled: ScheduledRow, text: Text) -> ScheduledRow:
        """What only the device knows of a decode row: where it is, and its tokens; missing drafts are never right."""
        assert set(scheduled.token_ids) == {UNKNOWN_TOKEN} and scheduled.num_computed_tokens <= text.num_computed_tokens
        drafts = [*text.draft_token_ids, *[UNKNOWN_TOKEN] * self.limits.num_spec_tokens][: scheduled.num_tokens - 1]
        tokens = [text.token_ids[-1], *drafts]
        return replace(scheduled, num_computed_tokens=text.num_computed_tokens, token_ids=tokens)

    def _max_held(self, scheduled: ScheduledRow, text: Text) -> int:
        spec = self.limits.num_spec_tokens
        if not self.limits.schedules_ahead:
            return spec + 2 if scheduled.is_decode else 5
        if scheduled.is_decode and text.ran_decode:
            return spec + 2 + (self.limits.mamba_block_tokens < 2 * spec + 2)
        return spec + 6 if scheduled.is_decode else 8

    def _share_out(self, rows: list[Row]) -> None:
        """Count the users of each block in this step: nobody may write a block that it shares.

        With every read and write going through a row's own blocks, this also means that no row's destination is
        another's source or destination.
        """
        self._kv_users = Counter(b for row in rows for b in row.scheduled.kv_blocks)
        self._state_users = Counter(b for row in rows for b in row.scheduled.mamba_blocks.values())

    def _block(self, row: Row, column: int) -> int:
        """The block of one of the row's columns, to read."""
        assert 0 <= column < self.batch.mamba_block_table.shape[1], f"column {column} outside the table"
        block = row.scheduled.mamba_blocks.get(column, NULL_BLOCK)
        assert block == self.batch.mamba_block_table[row.index, column]
        assert block != NULL_BLOCK, f"column {column} is not held"
        return block

    def _writable(self, row: Row, column: int) -> int:
        block = self._block(row, column)
        assert self._state_users[block] == 1, f"write to state block {block}, which is shared"
        assert block not in self.sealed_states, f"write to published state block {block}"
        return block

    def _window(self, states: list[int], n: int) -> list[Value]:
        """The conv inputs of the W-1 positions before n; an input depends on its own token too."""
        return [states[p + 1] if p >= 0 else ZERO for p in range(n - self.limits.conv_width + 1, n)]

    # before the forward pass

    def _move(self, row: Row) -> PrecopyInfo:
        batch, i = self.batch, row.index
        c, a = int(batch.mamba_state_idx[i]), int(batch.num_accepted[i])
        assert 1 <= a <= self.limits.num_spec_tokens + 1 and (row.scheduled.is_decode or a == 1), f"num_accepted {a}"
        info = precopy(c, row.n, row.q, a, self.limits.mamba_block_tokens)
        assert c <= info.dest_column <= (c + 1 if row.scheduled.is_decode else info.dest_column), f"{c} -> {info}"
        if info.source_column >= 0:
            source = self._block(row, info.source_column)
            temporal_source = self._block(row, info.source_column + info.token_bias)
            dest = self._writable(row, info.dest_column)
            self._copy(temporal_source, source, dest, info.token_bias)
            self.precopies[row.scheduled.request_id] = info
            self._moved(row)
        batch.mamba_state_idx[i] = info.dest_column
        return info

    def _moved(self, row: Row) -> None:
        """The live state is at the start of the running column now."""
        self.batch.num_accepted[row.index] = 1

    def _may_defer(self, n: int) -> bool:
        return may_defer(n, self.limits.mamba_block_tokens, self.limits.num_spec_tokens)

    def _has_deferred(self, row: Row) -> bool:
        """Whether the last step left the inputs of drafts that the row kept."""
        a = int(self.batch.num_accepted[row.index])
        return a > 1 and self._may_defer(row.n - a)

    def _num_replays(self, row: Row) -> int:
        """Drafts of the last step that the row runs again."""
        return int(self.batch.num_accepted[row.index]) - 1 if self._has_deferred(row) else 0

    def _check_live(self, row: Row) -> None:
        """The state that the row continues from, and the inputs that it runs from there, are those up to n."""
        temporal, states, bias = self.memory.temporal, row.text.states, int(self.batch.num_accepted[row.index]) - 1
        column, n = int(self.batch.mamba_state_idx[row.index]), row.n
        column, n = (column, n - bias) if self._has_deferred(row) else (column + bias, n)
        assert temporal[self._block(row, column)] == states[n], "the live state is another"
        for _ in range(self._num_replays(row)):
            column, n = column + 1, n + 1
            left = temporal[self._block(row, column)]
            assert left == Inputs(states[n]), f"{left} is run again in place of token {n - 1}"
        assert n == row.n, f"the live state is that after {n} tokens, not {row.n}"

    def _copy(self, temporal_source: int, conv_source: int, dest: int, shift: int) -> None:
        memory = self.memory
        state = memory.temporal[temporal_source]
        assert not isinstance(state, Inputs), f"{state} are copied as a state"
        memory.temporal[dest], memory.carry[dest] = state, memory.carry[temporal_source]
        memory.put_conv(dest, memory.conv[conv_source][shift:])

    # forward

    def _slot_spans(self, row: Row, first: int, end: int) -> list[tuple[int, int, int, int]]:
        """Positions first..end-1 as (block, first slot, end slot, first position)."""
        size, blocks, spans = self.limits.kv_block_tokens, row.scheduled.kv_blocks, []
        while first < end:
            stop = min(end, first // size * size + size)
            block = blocks[first // size]
            assert block != NULL_BLOCK
            spans.append((block, first % size, first % size + stop - first, first))
            first = stop
        return spans

    def _read_slots(self, slots: list[list[Value]], row: Row, first: int, end: int) -> None:
        states = row.text.states
        for block, start, stop, p in self._slot_spans(row, first, end):
            expected = states[p + 1 : p + 1 + stop - start]
            assert slots[block][start:stop] == expected, f"slots of positions {p}.. in block {block} are another text's"

    def _write_slots(self, slots: list[list[Value]], row: Row, first: int, values: list[Value]) -> None:
        for block, start, stop, p in self._slot_spans(row, first, first + len(values)):
            assert self._kv_users[block] == 1, f"write to KV block {block}, which is shared"
            assert block not in self.sealed_kv, f"write to published KV block {block}"
            slots[block][start:stop] = values[p - first : p - first + stop - start]

    def _forward_kv(self, row: Row) -> None:
        state, chunk = row.text.states[row.n], self.limits.chunk_tokens
        for i, token_id in enumerate(row.scheduled.token_ids):
            state = extend(state, token_id, row.n + i // chunk * chunk if row.scheduled.by_chunk else None)
            row.fed.append(state)
        self._read_slots(self.memory.kv, row, 0, row.n)
        self._write_slots(self.memory.kv, row, row.n, row.fed)

    def _forward_decode(self, row: Row) -> None:
        memory, width = self.memory, self.limits.conv_width
        running, a = int(self.batch.mamba_state_idx[row.index]), int(self.batch.num_accepted[row.index])
        conv_block = self._writable(row, running)
        old = memory.conv[conv_block]
        assert old[a - 1 : a + width - 2] == self._window(row.text.states, row.n), "the conv window is another"
        self._check_live(row)
        self.num_replays += self._num_replays(row)
        memory.put_conv(conv_block, old[a : a + width - 2] + row.fed)
        defers = self._may_defer(row.n)
        for j, state in enumerate(row.fed):
            block = self._writable(row, running + j)
            memory.temporal[block], memory.carry[block] = Inputs(state) if defers and j else state, state
        row.left_inputs = defers and row.q > 1
        if row.text.ran_decode:
            self.turns[row.text.left_inputs, row.left_inputs] += 1

    def _forward_prefill(self, row: Row) -> None:
        memory, width, n = self.memory, self.limits.conv_width, row.n
        running = int(self.batch.mamba_state_idx[row.index])
        window: list[Value] = [ZERO] * (width - 1)
        if n:
            block = self._block(row, running)
            window = memory.conv[block][: width - 1]
            assert window == self._window(row.text.states, n), "the conv window is another"
            assert memory.temporal[block] == row.text.states[n], "the prefix's state is another"
            row.carry = memory.carry[block]
        inputs = window + row.fed
        assert running == cdiv(n + row.q, self.limits.mamba_block_tokens) - 1
        for m in {*row.scheduled.boundaries, n + row.q}:
            column = running if m == n + row.q else m // self.limits.mamba_block_tokens - 1
            memory.put_state(self._writable(row, column), row.fed[m - n - 1], inputs[m - n : m - n + width - 1])

    # after it

    def _sample(self, row: Row) -> None:
        scheduled, text = row.scheduled, row.text
        if not scheduled.samples:
            return
        first = 0 if scheduled.is_decode else row.q - 1
        for j in range(first, row.q):
            row.kept.append(true_token(row.fed[j], text.params, text.choice, self.limits.vocab_size))
            if j + 1 < row.q and row.kept[-1] != scheduled.token_ids[j + 1]:
                break

    def _keep_boundary(self, row: Row) -> None:
        if not row.scheduled.is_decode:
            self.batch.num_accepted[row.index] = 1
            return
        num_kept, running = len(row.kept), int(self.batch.mamba_state_idx[row.index])
        self.batch.num_accepted[row.index] = num_kept
        info = postcopy(running, row.n, num_kept, self.limits.mamba_block_tokens)
        if info is None:
            return
        dest = self._writable(row, info.dest_column)
        temporal_source = self._block(row, info.source_column + info.token_bias)
        self._copy(temporal_source, self._block(row, info.source_column), dest, info.token_bias)
        self.postcopies[row.scheduled.request_id] = info
        if info.dest_column == running:
            assert info.boundary == row.n + num_kept
            self._moved(row)

    def _finish(self, row: Row) -> RowResult:
        scheduled, text = row.scheduled, row.text
        self.spans[scheduled.request_id] = (row.n, row.num_final)
        text.extend(row.kept)
        text.num_computed_tokens, text.ran_decode = row.num_final, scheduled.is_decode
        text.left_inputs = row.left_inputs
        drafts: list[int] = []
        if scheduled.samples:
            num_drafts, num_right = self.draft_plan(scheduled.request_id, len(text.token_ids))
            drafts = self._drafts(text, num_drafts, num_right)
        if self.limits.num_lookahead_tokens:
            self._fill_drafter(row)
        text.draft_token_ids = drafts
        num_verified = sum(t != UNKNOWN_TOKEN for t in scheduled.token_ids[1:]) if scheduled.is_decode else 0
        return RowResult(scheduled.request_id, list(row.kept), None, drafts, num_verified)

    def _fill_drafter(self, row: Row) -> None:
        """Slots up to n', each from the hidden state before it and its token; feedback drafts dirty what follows."""
        n, end, states = row.n, row.num_final, row.text.states
        first = n + 1
        if not row.scheduled.is_decode and n:
            assert row.carry == states[n], "the carry is another"
            first = n
        self._read_slots(self.memory.drafter, row, 1, first)
        self._write_slots(self.memory.drafter, row, first, states[first + 1 : end + 2])
        if row.scheduled.samples:
            self._write_slots(self.memory.drafter, row, end + 1, [POISON] * (self.limits.num_spec_tokens - 1))

    def _drafts(self, text: Text, num_drafts: int, num_right: int) -> list[int]:
        state, drafts = text.states[-1], []
        for i in range(num_drafts):
            token_id = true_token(state, text.params, text.choice, self.limits.vocab_size)
            drafts.append(token_id if i != num_right else (token_id + 1) % self.limits.vocab_size)
            state = extend(state, drafts[-1])
        return drafts
