"""`preprocess_mamba` and `postprocess_mamba` against a row's own history of states, scalar and fused, SD and DS."""

import random

import pytest
import torch

from mambalign.worker.batch import NewRow, ScheduledRow, SchedulerOutput
from mambalign.worker.forward_batch import mamba_tables
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import PrecopyInfo, next_column, table_width
from mambalign.worker.mamba_utils import (
    CpuGpuBuffer,
    MambaSpecDecodeGPUContext,
    _resolve_fused_precopy,
    postprocess_mamba,
    preprocess_mamba,
)
from mambalign.worker.sampling_params import SamplingParams
from mambalign.worker.slot_batch import SlotBatch
from mambalign.worker.state_cache import StateCache, StateSpec

W, DIM, HIDDEN = 4, 5, 3
MAX_LEN, MAX_REQS = 96, 4


def make_cache(
    layout: str, block_tokens: int, num_spec_tokens: int, num_blocks: int, only_conv: bool = False
) -> StateCache:
    specs = [StateSpec("0", "conv", (DIM,), torch.float32), StateSpec("0", "temporal", (2, 3), torch.float32)]
    specs += [StateSpec("1", "conv", (2 * DIM,), torch.bfloat16), StateSpec("1", "temporal", (4,), torch.float32)]
    specs += [StateSpec("mtp", "carry", (HIDDEN,), torch.float32)]
    specs = [spec for spec in specs if spec.kind == "conv" or not only_conv]
    return StateCache.allocate(
        [],
        specs,
        num_kv_blocks=1,
        num_mamba_blocks=num_blocks,
        kv_block_tokens=1,
        mamba_block_tokens=block_tokens,
        conv_layout=layout,
        conv_width=W,
        num_spec_tokens=num_spec_tokens,
        fill=float("nan"),
    )


def row(request_id: str, n: int, q: int, blocks: dict[int, int], is_decode: bool = True) -> ScheduledRow:
    return ScheduledRow(
        request_id,
        admission=0,
        num_computed_tokens=n,
        token_ids=[0] * q,
        is_decode=is_decode,
        kv_blocks=[],
        mamba_blocks=blocks,
        boundaries=[],
        next_token_id=None,
    )


class Model:
    """States that name what they hold: temporal and carry after n tokens is `text + n`, a conv slot its input's."""

    def __init__(self, cache: StateCache, num_spec_tokens: int):
        self.cache, self.num_spec_tokens = cache, num_spec_tokens

    def slots(self, conv: torch.Tensor, block: int) -> torch.Tensor:
        """[state_len, dim] view of a conv block."""
        return conv[block].T if self.cache.conv_layout == "DS" else conv[block]

    def whole(self) -> list[torch.Tensor]:
        return [*self.cache.temporal, *([] if self.cache.carry is None else [self.cache.carry])]

    def step(self, text: int, n: int, q: int, is_decode: bool, blocks: dict[int, int], column: int, accepted: int):
        """Check what the row reads, then write what it leaves: DESIGN section 2, "Forward"."""
        if n:
            for tensor in self.whole():
                assert (tensor[blocks[column + accepted - 1]] == text + n).all()
            for conv in self.cache.conv:
                window = self.slots(conv, blocks[column])[accepted - 1 : accepted + W - 2]
                want = (torch.arange(n - (W - 1), n) + text).clamp(min=text - 1)
                assert (window == want[:, None]).all()
        for conv in self.cache.conv:
            slots = self.slots(conv, blocks[column])
            slots.fill_(float("nan"))
            if is_decode:
                kept = torch.arange(n - (W - 2), n + q) + text
                slots[: W - 2 + q] = kept.clamp(min=text - 1)[:, None].to(conv.dtype)
            else:
                kept = torch.arange(n + q - (W - 1), n + q) + text
                slots[: W - 1] = kept.clamp(min=text - 1)[:, None].to(conv.dtype)
        for j in range(q) if is_decode else [q - 1]:
            block = blocks[column + j] if is_decode else blocks[column]
            for tensor in self.whole():
                tensor[block] = text + n + j + 1

    def check_boundary(self, text: int, boundary: int, block: int):
        for tensor in self.whole():
            assert (tensor[block] == text + boundary).all()
        for conv in self.cache.conv:
            want = (torch.arange(boundary - (W - 1), boundary) + text).clamp(min=text - 1)
            assert (self.slots(conv, block)[: W - 1] == want[:, None]).all()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "scalar"])
@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("num_spec_tokens", [0, 1, 3, 7])
def test_rows_find_their_own_states(layout, num_spec_tokens, fused):
    """Random rows, pieces, drafts and acceptance: every state is read and kept at exactly the right position."""
    if layout == "DS" and num_spec_tokens and not fused:
        pytest.skip("a DS conv state with accepted drafts has no scalar copy")
    rng = random.Random(num_spec_tokens)
    biased = postcopies = 0
    for block_tokens in {num_spec_tokens + 1, num_spec_tokens + 4}:
        counts = run_rows(rng, layout, num_spec_tokens, block_tokens, fused)
        biased, postcopies = biased + counts[0], postcopies + counts[1]
    assert (postcopies > 0) == (biased > 0) == (num_spec_tokens > 0)  # S = 0 ends on every boundary in place


@pytest.mark.parametrize(("layout", "fused"), [("SD", True), ("SD", False), ("DS", True)])
def test_rows_of_a_model_whose_states_are_conv_windows_alone(layout, fused):
    assert min(run_rows(random.Random(0), layout, 3, 4, fused, only_conv=True)) > 0


def run_rows(rng: random.Random, layout: str, S: int, B: int, fused: bool, only_conv: bool = False) -> tuple[int, int]:
    width = table_width(MAX_LEN, B, S)
    cache = make_cache(layout, B, S, 1 + MAX_REQS * width, only_conv)
    ctx = MambaSpecDecodeGPUContext(cache, MAX_REQS, width, copy_block_size=64) if fused else None
    batch, model = InputBatch(MAX_REQS, width, B), Model(cache, S)
    prompts = [rng.randint(1, 3 * B) for _ in range(MAX_REQS)]
    done = [0] * MAX_REQS
    new_rows = [NewRow(str(r), SamplingParams(), 0, prompts[r], [0] * prompts[r], 0) for r in range(MAX_REQS)]
    for new in new_rows:
        batch.add(new)
    biased = postcopies = 0
    while min(done) < MAX_LEN - S - 1:
        rows = []
        for r in rng.sample(range(MAX_REQS), rng.randint(1, MAX_REQS)):
            if done[r] >= MAX_LEN - S - 1:
                continue
            decode = done[r] >= prompts[r]
            q = rng.randint(1, S + 1) if decode else min(rng.randint(1, 2 * B), prompts[r] - done[r])
            blocks = {k: 1 + r * width + k for k in range(width)}
            rows.append(row(str(r), done[r], q, blocks, decode))
        output = SchedulerOutput(sorted(rows, key=lambda each: batch.row_of[each.request_id]))
        columns = [int(batch.mamba_state_idx[int(each.request_id)]) for each in output.rows]
        counts = preprocess_mamba(output, batch, cache, align_ctx=ctx, checked=True)
        biased += counts.num_biased_rows
        kept = []
        for each, column in zip(output.rows, columns, strict=True):
            r, n, q = int(each.request_id), each.num_computed_tokens, each.num_tokens
            now, accepted = int(batch.mamba_state_idx[r]), int(batch.num_accepted[r])
            assert now == next_column(column, n, q, B)
            model.step(1 + 2 * r * MAX_LEN % 128, n, q, each.is_decode, each.mamba_blocks, now, accepted)
            kept.append(rng.randint(1, q))
        postcopies += postprocess_mamba(output, kept, batch, cache, align_ctx=ctx, checked=True)
        for each, k in zip(output.rows, kept, strict=True):
            r, n = int(each.request_id), each.num_computed_tokens
            done[r] = n + (k if each.is_decode else each.num_tokens)
            boundary = done[r] // B * B
            if each.is_decode and boundary > n:
                block = each.mamba_blocks[boundary // B - 1]
                model.check_boundary(1 + 2 * r * MAX_LEN % 128, boundary, block)
            assert 1 <= batch.num_accepted[r] <= S + 1
    return biased, postcopies


def make_batch(*columns_and_accepted: tuple[int, int], width: int = 8, block_tokens: int = 8) -> InputBatch:
    batch = InputBatch(len(columns_and_accepted), width, block_tokens)
    for i, (column, accepted) in enumerate(columns_and_accepted):
        batch.add(NewRow(str(i), SamplingParams(), 0, 1, [0], 0))
        batch.mamba_state_idx[i], batch.num_accepted[i] = column, accepted
    return batch


def test_decision_reaches_the_staging_buffers_in_batch_order():
    cache = make_cache("DS", 8, 3, 20)
    ctx = MambaSpecDecodeGPUContext(cache, 4, 8)
    output = SchedulerOutput([row("0", 9, 4, {}), row("1", 15, 4, {}), row("2", 8, 1, {})])
    assert _resolve_fused_precopy(ctx, output) is None  # nothing decided yet
    output.mamba_precopy_info = [PrecopyInfo(-1, 1, 2), PrecopyInfo(1, 2, 3), PrecopyInfo(0, 1, 0)]
    assert _resolve_fused_precopy(None, output) is None
    fused = _resolve_fused_precopy(ctx, output)
    assert fused.num_reqs == 3
    assert ctx.precopy_src_col_buf.np[:3].tolist() == [-1, 1, 0]
    assert ctx.mamba_state_idx_buf.np[:3].tolist() == [1, 2, 1]
    assert ctx.precopy_token_bias_buf.np[:3].tolist() == [2, 3, 0]
    assert ctx.work_list_buf.np[: ctx.work_count_buf.np[0]].tolist() == [1, 2]
    output.mamba_precopy_info = [PrecopyInfo(-1, 1, 0)] * 3
    assert _resolve_fused_precopy(ctx, output) is None


def test_a_step_without_a_crossing_moves_nothing():
    cache = make_cache("SD", 8, 3, 20)
    before = [state.tensor.clone() for state in cache.mamba_states()]
    batch = make_batch((1, 3))
    output = SchedulerOutput([row("0", 12, 4, {1: 3, 2: 4, 3: 5, 4: 6})])
    ctx = MambaSpecDecodeGPUContext(cache, 4, 8)
    assert preprocess_mamba(output, batch, cache, align_ctx=ctx, checked=True)[:2] == (0, 0)
    assert output.mamba_precopy_info == [PrecopyInfo(-1, 1, 2)]
    assert batch.num_accepted[0] == 3 and batch.mamba_state_idx[0] == 1
    assert postprocess_mamba(output, [2], batch, cache, align_ctx=ctx, checked=True) == 0
    assert batch.num_accepted[0] == 2
    for state, old in zip(cache.mamba_states(), before, strict=True):
        assert torch.equal(state.tensor.view(torch.uint8), old.view(torch.uint8))


def slot_batch(
    cache: StateCache,
    columns_and_accepted: list[tuple[int, int]],
    n: list[int],
    tables: list[dict[int, int]],
) -> tuple[SlotBatch, torch.Tensor]:
    """The same rows as V2 holds them, and their slots, which are not in row order."""
    batch = SlotBatch(MambaSpecDecodeGPUContext(cache, 4, 8), 4, 3, 0)
    slots = torch.tensor([2, 0][: len(n)])
    batch.running_column[slots], batch.num_accepted[slots] = torch.tensor(columns_and_accepted, dtype=torch.int32).T
    batch.num_computed[slots] = torch.tensor(n, dtype=torch.int32)
    batch.set_block_tables(slots, torch.from_numpy(mamba_tables(tables, 8)))
    return batch, slots.int()


PATHS = pytest.mark.parametrize("path", ["scalar", "fused", "slots"])


def preprocess_checked(path: str, output: SchedulerOutput, *columns_and_accepted: tuple[int, int]) -> None:
    cache = make_cache("SD", 8, 3, 20)
    if path == "slots":
        n, tables = zip(*((each.num_computed_tokens, each.mamba_blocks) for each in output.rows), strict=True)
        batch, idx_mapping = slot_batch(cache, list(columns_and_accepted), list(n), list(tables))
        options = {"align_ctx": batch.align_ctx, "idx_mapping": idx_mapping}
    else:
        batch = make_batch(*columns_and_accepted)
        options = {"align_ctx": MambaSpecDecodeGPUContext(cache, 4, 8) if path == "fused" else None}
    preprocess_mamba(output, batch, cache, checked=True, **options)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (({0: 1, 1: 2}, {0: 2, 1: 3}), "rows"),  # row 0 writes what row 1 reads
        (({0: 1, 1: 3}, {0: 2, 1: 3}), "one block"),
        (({0: 1, 1: 0}, {0: 2, 1: 3}), "no block"),
    ],
)
@PATHS
def test_checked_mode_refuses_a_schedule_that_breaks_a_law(tables, message, path):
    output = SchedulerOutput([row(str(i), 8, 1, blocks) for i, blocks in enumerate(tables)])
    with pytest.raises(AssertionError, match=message):
        preprocess_checked(path, output, (0, 1), (0, 1))


@PATHS
@pytest.mark.parametrize("n", [8, 7])  # a row that moves, and one that does not
def test_checked_mode_refuses_a_stale_accepted_count(path, n):
    for accepted in (0, 5):
        output = SchedulerOutput([row("0", n, 1, {0: 1, 1: 2, 4: 3, 5: 4})])
        with pytest.raises(AssertionError, match="num_accepted"):
            preprocess_checked(path, output, (0, accepted))


@PATHS
def test_checked_mode_refuses_a_prefill_row_with_a_shift(path):
    output = SchedulerOutput([row("0", 7, 1, {0: 1, 1: 2}, is_decode=False)])
    with pytest.raises(AssertionError, match="prefills"):
        preprocess_checked(path, output, (0, 2))


@pytest.mark.parametrize(
    ("tables", "kept", "message"),
    [
        (({0: 1, 1: 2}, {0: 3, 1: 4}), [2, 5], "num_accepted 5"),
        (({0: 1, 1: 2}, {0: 1, 1: 4}), [2, 2], "one block"),
        (({0: 1, 1: 2}, {0: 2, 1: 4}), [2, 2], "which rows"),
        (({0: 1, 1: 2}, {1: 4}), [2, 2], "no block"),
    ],
)
def test_checked_mode_refuses_a_boundary_that_breaks_a_law(tables, kept, message):
    """V2, after sampling: both rows run in column 1, and keep the state after 8 tokens in column 0."""
    batch, idx_mapping = slot_batch(make_cache("SD", 8, 3, 20), [(1, 1), (1, 1)], [7, 7], list(tables))
    with pytest.raises(AssertionError, match=message):
        batch.check_kept(torch.tensor(kept, dtype=torch.int32), idx_mapping)


def test_row_sizes_are_sent_when_they_change():
    batch = SlotBatch(MambaSpecDecodeGPUContext(make_cache("SD", 8, 3, 20), 4, 8), 4, 3, 0)
    sent = batch.send_num_scheduled([4, 4])
    assert batch.send_num_scheduled([4, 4]) is sent
    for counts in ([4, 1], [4], [4, 4]):
        assert batch.send_num_scheduled(counts).tolist() == counts
    assert sent.tolist() == [4, 4]


def test_several_rows_resume_from_one_published_block():
    cache = make_cache("DS", 8, 3, 20)
    for state in cache.mamba_states():
        state.tensor[1] = 7
    batch = make_batch((0, 1), (0, 1), (0, 1))
    output = SchedulerOutput([row(str(i), 8, 2, {0: 1, 1: 2 + i}, is_decode=False) for i in range(3)])
    ctx = MambaSpecDecodeGPUContext(cache, 4, 8)
    assert preprocess_mamba(output, batch, cache, align_ctx=ctx, checked=True)[:2] == (3, 0)
    for state in cache.mamba_states():
        assert (state.tensor[1:5] == 7).all() and state.tensor[5:].isnan().all()


def test_alternating_draft_counts_around_a_boundary():
    """n = B-2, q = 4, one token kept: the running column has moved on; q = 1 must not move it back."""
    cache = make_cache("DS", 8, 3, 20)
    ctx, batch = MambaSpecDecodeGPUContext(cache, 1, 8), make_batch((0, 1))
    blocks = {k: 10 + k for k in range(6)}
    for state in cache.mamba_states():
        state.tensor[10] = 1
    output = SchedulerOutput([row("0", 6, 4, blocks)])
    assert preprocess_mamba(output, batch, cache, align_ctx=ctx, checked=True).num_rows == 1
    assert postprocess_mamba(output, [1], batch, cache, align_ctx=ctx, checked=True) == 0
    output = SchedulerOutput([row("0", 7, 1, blocks)])
    assert preprocess_mamba(output, batch, cache, align_ctx=ctx, checked=True).num_rows == 0
    assert output.mamba_precopy_info == [PrecopyInfo(-1, 1, 0)]
    assert postprocess_mamba(output, [1], batch, cache, align_ctx=ctx, checked=True) == 1  # ends on 8: column 0
    assert batch.mamba_state_idx[0] == 1 and batch.num_accepted[0] == 1


def test_buffer_is_one_memory_on_a_cpu():
    buffer = CpuGpuBuffer(6, dtype=torch.int32, device="cpu", fill=-1)
    part = buffer.part(2, 3)
    part.np[:] = [1, 2, 3]
    assert buffer.copy_to_gpu().tolist() == [-1, -1, 1, 2, 3, -1]
    assert part.copy_to_gpu(2).tolist() == [1, 2]


def test_states_that_cannot_be_addressed_are_refused():
    cache = make_cache("SD", 8, 3, 20)
    cache.conv[0] = cache.conv[0].transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        MambaSpecDecodeGPUContext(cache, 1, 8)
