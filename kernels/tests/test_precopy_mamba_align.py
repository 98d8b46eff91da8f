"""The migration kernels against plain torch slices, and against the scalar path.

Compiled on a GPU, through Triton's interpreter on a CPU, where a test runs on few and small states. Free blocks hold
NaN; bytes are compared as bits, over everything but the conv slots that a shift leaves undefined.
"""

import random

import pytest
import torch

from mambalign.kernels.batch_memcpy import batch_memcpy, batch_memcpy_reference
from mambalign.kernels.mamba_state_table import MambaState, StateTable, describe_states
from mambalign.kernels.postprocess_mamba import postprocess_mamba_fused, postprocess_mamba_fused_reference
from mambalign.kernels.precopy_mamba_align import (
    precopy_mamba_align_fused,
    precopy_mamba_align_fused_kernel,
    precopy_mamba_align_fused_reference,
)
from mambalign.kernels.preprocess_mamba_align import (
    preprocess_mamba_align_fused,
    preprocess_mamba_align_fused_reference,
)
from mambalign.worker.batch import NewRow, ScheduledRow, SchedulerOutput
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import PrecopyInfo, first_column, postcopy, precopy
from mambalign.worker.mamba_utils import MambaSpecDecodeGPUContext, get_conv_copy_spec, preprocess_mamba
from mambalign.worker.scalar_copy import MambaCopyList, collect_mamba_copy_meta, do_mamba_copy_block
from mambalign.worker.state_cache import StateCache, StateSpec

BLOCK = 1024  # bytes of a tile here, so that small states have several
W = 4  # conv width
REPEATS = 1000 if torch.cuda.is_available() else 12  # races need a GPU; the interpreter runs programs in turn
LAYOUTS = pytest.mark.parametrize("layout", ["SD", "DS"])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, as integers of the same width: NaNs compare."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


class Case:
    """States with their block tables, and one decision a slot."""

    def __init__(self, device: str, layout: str, num_blocks: int = 64, width: int = 12):
        self.device, self.layout, self.num_blocks, self.width = device, layout, num_blocks, width
        self.states: list = []
        self._states: StateTable | None = None
        self.num_programs: int | None = None
        self.num_groups = 1
        self.rng = random.Random(0)

    def add(self, kind: str, shape: tuple[int, ...], dtype=torch.float32, group: int = 0, tensor=None) -> "Case":
        """A state; `shape` of a conv state is (state_len, dim) in either layout."""
        if tensor is None:
            if kind == "conv" and self.layout == "DS":
                shape = shape[::-1]
            tensor = torch.empty((self.num_blocks, *shape), dtype=dtype, device=self.device)
        self.states.append(MambaState(tensor, kind, group))
        self.num_groups = max(self.num_groups, group + 1)
        return self

    def add_small_model(self, num_spec_tokens: int = 3) -> "Case":
        """A conv state, a temporal state and a carry, with element sizes 2, 4 and 1."""
        self.add("conv", (W - 1 + num_spec_tokens, 24), torch.bfloat16)
        self.add("temporal", (4, 9, 8))
        return self.add("carry", (17,), torch.uint8)

    def slots(self, state, block: int, start: int, stop: int) -> torch.Tensor:
        """Conv slots of a block, `[slots, dim]`."""
        tensor = state.tensor[block]
        return tensor[:, start:stop].T if self.layout == "DS" else tensor[start:stop]

    def prepare(self, num_slots: int) -> None:
        """Distinct blocks for every slot and group, all poisoned; nothing moves yet."""
        for state in self.states:
            state.tensor.fill_(float("nan") if state.tensor.is_floating_point() else 255)
        blocks = self.rng.sample(range(1, self.num_blocks), num_slots * self.num_groups * self.width)
        self.table = torch.tensor(blocks, dtype=torch.int32).view(num_slots, self.num_groups, self.width)
        self.decisions = [(-1, 0, 0)] * num_slots  # source column, dest column, bias

    def fill(self, slot: int, columns: range) -> None:
        """Random bits in the blocks that a row may read."""
        for state in self.states:
            for column in columns:
                tensor = state.tensor[int(self.table[slot, state.group, column])]
                random_bits = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8)
                tensor.copy_(random_bits.view(tensor.dtype).view(tensor.shape))

    def decide(self, slot: int, source: int, dest: int, bias: int) -> None:
        self.fill(slot, range(source, source + bias + 1))
        self.decisions[slot] = (source, dest, bias)

    def decide_randomly(self, num_spec_tokens: int, share: float = 1.0) -> None:
        for slot in range(len(self.decisions)):
            source, bias = self.rng.randrange(0, self.width - num_spec_tokens - 1), self.rng.randint(0, num_spec_tokens)
            if slot == 0 or self.rng.random() < share:
                self.decide(slot, source, source + 1, bias)
            else:
                self.decisions[slot] = (-1, source, bias)

    def expected(self, slots: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per state: its bits after the move, by slices; and which of them are defined."""
        results = []
        for state in self.states:
            after, defined = state.tensor.clone(), torch.ones(state.tensor.shape, dtype=torch.bool)
            view, seen = state._replace(tensor=after), state._replace(tensor=defined)
            for slot in slots:
                source, dest, bias = self.decisions[slot]
                if source < 0:
                    continue
                row = self.table[slot, state.group].tolist()
                if state.kind != "conv":
                    after[row[dest]] = state.tensor[row[source + bias]]
                    continue
                length = state.tensor.shape[2 if self.layout == "DS" else 1]
                kept = self.slots(state, row[source], bias, length).clone()
                self.slots(view, row[dest], 0, length - bias).copy_(kept)
                self.slots(seen, row[dest], length - bias, length).fill_(False)
            results.append((bits(after), defined.to(self.device)))
        return results

    def check(self, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        assert self.table_of_states().tickets.tolist() == [0]
        for state, (after, defined) in zip(self.states, expected, strict=True):
            wrong = (bits(state.tensor) != after) & defined
            assert not wrong.any(), f"{state.kind} {tuple(state.tensor.shape)}: {wrong.nonzero()[:4].tolist()}"

    def table_of_states(self) -> StateTable:
        """The same for every launch of the case."""
        if self._states is None:
            self._states = StateTable.of(self.states, self.layout == "DS", BLOCK, self.num_programs)
        return self._states

    def int32(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def trapped(self, value: int, values) -> torch.Tensor:
        """`values`, behind an entry that index -1 would read."""
        return self.int32([value, *values])[1:]

    def run_precopy(
        self, *, function=precopy_mamba_align_fused, idx_mapping=None, work_list=None, num_reqs=None
    ) -> None:
        source, dest, bias = zip(*self.decisions, strict=True)
        function(
            self.trapped(0, source),
            self.trapped(1, dest),
            self.trapped(0, bias),
            torch.cat([self.table[:1], self.table])[1:].to(self.device),
            None if idx_mapping is None else self.int32(idx_mapping),
            None if work_list is None else self.int32([*work_list, -99]),  # what follows the list is never read
            None if work_list is None else self.int32([len(work_list)]),
            len(self.decisions) if num_reqs is None else num_reqs,
            self.table_of_states(),
        )

    def moving(self) -> list[int]:
        return [slot for slot, decision in enumerate(self.decisions) if decision[0] >= 0]


def small_case(device: str, layout: str, num_slots: int, num_spec_tokens: int = 3) -> Case:
    width = num_spec_tokens + 3
    case = Case(device, layout, num_blocks=num_slots * width + 2, width=width).add_small_model(num_spec_tokens)
    case.prepare(num_slots)
    return case


def check_precopy(case: Case, **options) -> None:
    expected = case.expected(list(range(len(case.decisions))))
    case.run_precopy(**options)
    case.check(expected)


@LAYOUTS
@pytest.mark.parametrize("num_spec_tokens", [0, 1, 3, 8])
def test_precopy_moves_every_bias(device, layout, num_spec_tokens):
    case = small_case(device, layout, num_spec_tokens + 1, num_spec_tokens)
    for bias in range(num_spec_tokens + 1):
        case.decide(bias, 1, 2, bias)
    check_precopy(case)


@LAYOUTS
def test_reference_moves_every_bias(layout):
    case = small_case("cpu", layout, 4)
    for bias in range(4):
        case.decide(bias, 1, 2, bias)
    check_precopy(case, function=precopy_mamba_align_fused_reference)


@LAYOUTS
@pytest.mark.parametrize("num_programs", [1, 3, 40])
def test_any_number_of_programs_shares_the_tiles(device, layout, num_programs):
    """Fewer programs than tiles and more; launch after launch finds the tickets in place, also where no tile moves."""
    case = Case(device, layout, num_blocks=40, width=6)
    case.num_programs = num_programs
    case.add("temporal", (2, BLOCK // 4)).add("conv", (6, 100), torch.bfloat16).add("carry", (5,)).add("conv", (6, 9))
    case.prepare(5)
    for slot, bias in enumerate((1, 0, 1, 3, 2)):  # with a bias of 1 the temporal state lies at its destination
        case.decide(slot, 1, 2, bias)
    states = case.table_of_states()
    assert states.tile_state.tolist() == [1] * 2 + [3] + [0] * 2 + [2] and states.num_conv_tiles == 3
    before, expected = [state.tensor.clone() for state in case.states], case.expected(list(range(5)))
    for work_list in (None, [4, 0, 3, 2, 1]):
        for state, tensor in zip(case.states, before, strict=True):
            state.tensor.copy_(tensor)
        case.run_precopy(work_list=work_list)
        case.check(expected)


def test_a_state_without_a_conv_has_no_tiles_where_it_lies_already(device):
    case = Case(device, "SD", num_blocks=16, width=4).add("temporal", (3, BLOCK))
    case.prepare(2)
    case.decide(0, 0, 1, 1)
    case.decide(1, 0, 1, 2)
    expected = case.expected([0])
    case.run_precopy(work_list=[0])
    case.check(expected)
    check_precopy(case)


@LAYOUTS
def test_conv_states_alone_move_with_every_bias(device, layout):
    """Where no state is copied whole, none lies at its destination already: all tiles of a row move with any bias."""
    case = Case(device, layout, num_blocks=20, width=4).add("conv", (5, 300), torch.bfloat16).add("conv", (5, 9))
    case.num_programs = 3
    case.prepare(4)
    for slot, bias in enumerate((1, 0, 2, 1)):
        case.decide(slot, 0, 1, bias)
    states = case.table_of_states()
    assert states.num_conv_tiles == states.num_tiles > 2
    expected = case.expected([0, 2])
    case.run_precopy(work_list=[2, 0])
    case.check(expected)
    check_precopy(case)


@LAYOUTS
@pytest.mark.parametrize("num_reqs", [1, 4, 16, 65])
def test_work_list_and_all_rows_agree(device, layout, num_reqs):
    """The work list only names the rows to visit."""
    case = small_case(device, layout, num_reqs)
    case.decide_randomly(3, share=0.2)
    before = [state.tensor.clone() for state in case.states]
    expected = case.expected(list(range(num_reqs)))
    case.run_precopy(work_list=case.moving())
    case.check(expected)
    for state, tensor in zip(case.states, before, strict=True):
        state.tensor.copy_(tensor)
    case.run_precopy()
    case.check(expected)


@LAYOUTS
@pytest.mark.parametrize("num_reqs", [1, 4, 16, 65])
def test_v1_equals_v2_under_random_idx_mapping(device, layout, num_reqs):
    """V1: decisions in batch order. V2: decisions by slot, rows with a negative slot write nothing."""
    v2 = small_case(device, layout, num_reqs + 3)
    v2.decide_randomly(3, share=0.2)
    slots = v2.rng.sample(range(num_reqs + 3), num_reqs)
    idx_mapping = [slot if v2.rng.random() < 0.8 or num_reqs == 1 else -1 for slot in slots]
    rows = [row for row in range(num_reqs) if idx_mapping[row] < 0 or v2.decisions[idx_mapping[row]][0] >= 0]
    before = [state.tensor.clone() for state in v2.states]
    expected = v2.expected([slot for slot in idx_mapping if slot >= 0])
    v2.run_precopy(idx_mapping=idx_mapping, work_list=rows, num_reqs=num_reqs)
    v2.check(expected)

    v1 = Case(device, layout, num_blocks=v2.num_blocks, width=v2.width)
    v1.states = [state._replace(tensor=tensor) for state, tensor in zip(v2.states, before, strict=True)]
    v1.table = torch.stack([v2.table[slot] for slot in idx_mapping])
    v1.decisions = [v2.decisions[slot] if slot >= 0 else (-1, 0, 0) for slot in idx_mapping]
    v1.run_precopy(work_list=v1.moving())
    for state, other in zip(v1.states, v2.states, strict=True):
        assert torch.equal(bits(state.tensor), bits(other.tensor))


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("state_len", "dims"), [(6, (1, 3, BLOCK - 1, BLOCK, BLOCK + 1)), (11, (1, BLOCK + 1))])
def test_conv_dims_around_the_copy_block(device, layout, dtype, state_len, dims):
    case = Case(device, layout, num_blocks=8, width=3)
    for dim in dims:
        case.add("conv", (state_len, dim), dtype)
    case.prepare(2)
    case.decide(0, 0, 1, 1)
    case.decide(1, 0, 1, 0)
    check_precopy(case)


@LAYOUTS
@pytest.mark.parametrize("state_len", [BLOCK - 1, BLOCK, BLOCK + 1])
def test_state_lens_around_the_copy_block(device, layout, state_len):
    case = Case(device, layout, num_blocks=9, width=4)
    case.add("conv", (state_len, 3), torch.uint8).add("conv", (state_len, 8), torch.bfloat16)
    case.prepare(2)
    case.decide(0, 0, 1, 2)
    check_precopy(case)


@pytest.mark.parametrize("num_elements", [1, 3, BLOCK // 4 - 1, BLOCK // 4, BLOCK // 4 + 1, BLOCK])
@pytest.mark.parametrize("kind", ["temporal", "carry"])
def test_whole_states_around_the_copy_block(device, kind, num_elements):
    case = Case(device, "SD", num_blocks=16, width=4)
    for dtype in (torch.uint8, torch.float16, torch.float32):
        case.add(kind, (num_elements,), dtype)
    case.prepare(2)
    case.decide(0, 0, 1, 2)
    check_precopy(case)


@LAYOUTS
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_misaligned_bases_and_strides(device, layout, offset):
    """A base and a block stride that allow only narrow access."""
    case = Case(device, layout, num_blocks=9, width=4)
    for kind, shape in (("conv", (6, 16)), ("temporal", (5, 16))):
        if kind == "conv" and layout == "DS":
            shape = shape[::-1]
        size = shape[0] * shape[1]
        memory = torch.empty(9 * (size + offset) + offset, dtype=torch.bfloat16, device=case.device)
        strides = (size + offset, shape[1], 1)
        case.add(kind, shape, tensor=memory.as_strided((9, *shape), strides, storage_offset=offset))
    case.prepare(2)
    case.decide(0, 0, 1, 1)
    case.decide(1, 0, 1, 2)
    check_precopy(case)


@LAYOUTS
def test_groups_use_their_own_block_tables(device, layout):
    case = Case(device, layout, num_blocks=50, width=5)
    for group in (2, 0, 1):
        case.add("conv", (6, 8), torch.float32, group).add("temporal", (40,), torch.float32, group)
    case.prepare(3)
    case.decide_randomly(3)
    check_precopy(case)


@LAYOUTS
def test_byte_offsets_past_two_to_the_31(device, layout):
    """Virtual memory of 4.3 GB, of which a few pages are touched."""
    case = Case(device, layout, width=3)
    stride, num_blocks = 1 << 20, (1 << 12) + 8
    memory = torch.empty(num_blocks * stride, dtype=torch.uint8, device=case.device)
    shape = (48, 6) if layout == "DS" else (6, 48)
    conv = memory.view(torch.int16).as_strided((num_blocks, *shape), (stride // 2, shape[1], 1))
    temporal = memory[1 << 16 :].view(torch.int16).as_strided((num_blocks, 300), (stride // 2, 1))
    case.add("conv", shape, tensor=conv).add("temporal", (300,), tensor=temporal)
    case.table = torch.tensor([[[2047, 2049, 4096]], [[4097, 5, 4100]], [[6, 4098, 4101]]], dtype=torch.int32)
    case.decisions = [(0, 2, 1), (0, 2, 1), (0, 2, 0)]
    conv[5:7], temporal[5:7] = 1, 2  # where 32-bit arithmetic would land
    for slot in range(3):
        case.fill(slot, range(3))
    rows = case.table[:, 0].tolist()
    biases = [bias for _, _, bias in case.decisions]
    want = [(conv[row[0]].clone(), temporal[row[bias]].clone()) for row, bias in zip(rows, biases, strict=True)]
    case.run_precopy()
    for row, (_, dest, bias), (old_conv, old_temporal) in zip(rows, case.decisions, want, strict=True):
        new_conv = conv[row[dest]]
        if layout == "DS":
            assert torch.equal(new_conv[:, : 6 - bias], old_conv[:, bias:])
        else:
            assert torch.equal(new_conv[: 6 - bias], old_conv[bias:])
        assert torch.equal(temporal[row[dest]], old_temporal)


@LAYOUTS
def test_padding_rows_write_nothing(device, layout):
    case = small_case(device, layout, 3)
    for slot in range(3):
        case.decide(slot, 0, 1, slot)
    expected = case.expected([])
    case.run_precopy(idx_mapping=[-1, -1, -1], work_list=[0, 1, 2])
    case.run_precopy(idx_mapping=[-1, -1, -1])
    case.run_precopy(work_list=[])
    case.check(expected)


@LAYOUTS
def test_rows_that_read_one_published_block(device, layout):
    case = small_case(device, layout, 4)
    case.table[:, 0, 0] = case.table[0, 0, 0]
    for slot in range(4):
        case.decide(slot, 0, 1, 0)
    shared = [bits(state.tensor[int(case.table[0, 0, 0])]).clone() for state in case.states]
    check_precopy(case)
    for state, before in zip(case.states, shared, strict=True):
        assert torch.equal(bits(state.tensor[int(case.table[0, 0, 0])]), before)


# The scalar path: what V1 would copy one pointer at a time.


@LAYOUTS
@pytest.mark.parametrize("num_spec_tokens", [0, 3, 8])
def test_precopy_matches_v1_copy_specs(device, layout, num_spec_tokens):
    """Row-exact against `get_conv_copy_spec` and `get_temporal_copy_spec` wherever those are defined."""
    case = small_case(device, layout, 5, num_spec_tokens)
    case.decide_randomly(num_spec_tokens)
    if layout == "DS":  # defined for one accepted token only
        case.decisions = [(source, dest, 0) for source, dest, _ in case.decisions]
    before = [state.tensor.clone() for state in case.states]
    case.run_precopy()
    fused = [state.tensor.clone() for state in case.states]

    for state, tensor in zip(case.states, before, strict=True):
        state.tensor.copy_(tensor)
    metas = describe_states(case.states, layout == "DS", BLOCK)
    copies = MambaCopyList()
    for slot, decision in enumerate(case.decisions):
        info = PrecopyInfo(*decision)
        collect_mamba_copy_meta(copies, metas, layout, case.table[slot, 0].numpy(), info)
    assert len(copies.sizes) >= 3 * 5 - 2 * 5  # a temporal state that lies at its destination already is left out
    do_mamba_copy_block(copies, device)
    for state, tensor in zip(case.states, fused, strict=True):
        undefined = state.kind == "conv" and layout == "SD"  # last word of a shift that is no whole word
        mine, theirs = bits(tensor), bits(state.tensor)
        if undefined:
            for slot, (_, dest, bias) in enumerate(case.decisions):
                block = int(case.table[slot, 0, dest])
                mine[block, mine.shape[1] - bias :] = theirs[block, mine.shape[1] - bias :]
        assert torch.equal(mine, theirs)


def test_ds_conv_copy_spec_reproduces_multi_accept_assert(device):
    """A DS tail is not contiguous: the scalar path refuses it, the fused kernel copies it."""
    case = small_case(device, "DS", 2)
    metas = describe_states(case.states, True, BLOCK)
    row = case.table[0, 0].numpy()
    assert get_conv_copy_spec(metas[0], row, 1, 1, "DS").num_bytes == metas[0].inner_size
    for num_accepted in (2, 3, 4):
        with pytest.raises(AssertionError, match="DS conv state"):
            get_conv_copy_spec(metas[0], row, 1, num_accepted, "DS")
    case.decide(0, 1, 2, 2)
    case.decide(1, 1, 2, 3)
    check_precopy(case)


def test_batch_memcpy_matches_its_reference(device):
    sizes = [1, 7, 8, 1000, 1024, 3000]
    memory = torch.randint(0, 256, (20000,), dtype=torch.uint8, device=device)
    expected, at, copies = memory.clone(), 3, []
    for i, size in enumerate(sizes):
        at += 8 if i % 2 else 5
        shift = 16 if i % 2 else 3  # overlaps itself, to the left
        expected[at : at + size] = memory[at + shift : at + shift + size]
        copies.append((memory.data_ptr() + at + shift, memory.data_ptr() + at, size))
        at += size + shift
    lists = torch.tensor(copies, device=device).T.contiguous()
    once = memory.clone()
    batch_memcpy(*lists)
    assert torch.equal(memory, expected)
    if device == "cpu":
        memory.copy_(once)
        batch_memcpy_reference(*lists)
        assert torch.equal(memory, expected)


# After sampling: decide, copy, and note how many tokens stay.


class PostCase(Case):
    """Slots with n, running column and kept tokens; decisions follow from them."""

    def settle(self, rows: list[tuple[int, int, int]], block_tokens: int) -> None:
        """rows: (n, running column, kept), kept 0 for a prefill row."""
        self.rows, self.block_tokens = rows, block_tokens
        for slot, (n, column, kept) in enumerate(rows):
            info = postcopy(column, n, kept, block_tokens)
            if info is not None and kept:
                self.decide(slot, column, info.dest_column, info.token_bias)

    def accepted(self, slot: int) -> int:
        n, column, kept = self.rows[slot]
        info = postcopy(column, n, kept, self.block_tokens)
        return 1 if not kept or (info is not None and info.dest_column == column) else kept

    def run(self, idx_mapping: list[int] | None = None, function=postprocess_mamba_fused) -> torch.Tensor:
        slots = range(len(self.rows)) if idx_mapping is None else idx_mapping
        n, column, _ = (self.int32(values) for values in zip(*self.rows, strict=True))
        num_accepted = self.int32([99] * len(self.rows))
        function(
            self.int32([self.rows[slot][2] if slot >= 0 else 77 for slot in slots]),
            n,
            column,
            num_accepted,
            self.table.to(self.device),
            None if idx_mapping is None else self.int32(idx_mapping),
            len(slots),
            self.block_tokens,
            self.table_of_states(),
        )
        return num_accepted


def post_case(device: str, layout: str, rows: list[tuple[int, int, int]], block_tokens: int = 8) -> PostCase:
    case = PostCase(device, layout, num_blocks=len(rows) * 8 + 2, width=8).add_small_model(3)
    case.prepare(len(rows))
    case.settle(rows, block_tokens)
    return case


POST_ROWS = [  # around the boundary 16 of B = 8: (n, running column, kept)
    (n, column, kept)
    for n in range(12, 17)
    for column in (1, 2)
    for kept in range(5)
    if n + 4 > 16 or column == 1 or n < 16
]


@LAYOUTS
@pytest.mark.parametrize("form", ["kernel", "reference"])
def test_postprocess_keeps_boundaries_and_counts(device, layout, form):
    case = post_case("cpu" if form == "reference" else device, layout, POST_ROWS)
    expected = case.expected(list(range(len(POST_ROWS))))
    function = postprocess_mamba_fused_reference if form == "reference" else postprocess_mamba_fused
    num_accepted = case.run(function=function)
    assert num_accepted.tolist() == [case.accepted(slot) for slot in range(len(POST_ROWS))]
    assert len(case.moving()) > 10
    case.check(expected)


@LAYOUTS
def test_postprocess_by_slot_skips_padding(device, layout):
    case = post_case(device, layout, [(14, 1, 3), (15, 1, 4), (9, 1, 4), (13, 1, 3)])
    idx_mapping = [3, -1, 0, 2, -1]
    expected = case.expected([3, 0, 2])
    num_accepted = case.run(idx_mapping)
    assert num_accepted.tolist() == [case.accepted(0), 99, case.accepted(2), case.accepted(3)]
    case.check(expected)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_same_block_shifts_behave_like_memmove(device, layout, dtype):
    """A row that ends on its boundary keeps its state in place: the conv state shifts within its block."""
    rows = [(15 - bias, 1, 1 + bias) for bias in (1, 2, 3)]
    case = PostCase(device, layout, num_blocks=32, width=8)
    case.add("conv", (6, 1000 if device == "cuda" else 200), dtype).add("conv", (6, 7), dtype)
    case.prepare(len(rows))
    case.settle(rows, 8)
    assert all(source == dest for source, dest, _ in case.decisions)
    before, expected = [state.tensor.clone() for state in case.states], case.expected([0, 1, 2])
    for _ in range(REPEATS):
        for state, tensor in zip(case.states, before, strict=True):
            state.tensor.copy_(tensor)
        assert case.run().tolist() == [1, 1, 1]
        case.check(expected)


# Decisions on the device, and whole steps of V2.


def as_tensors(values: dict[str, list[int]], device: str) -> dict[str, torch.Tensor]:
    """int32, but for the totals."""
    kinds = {name: torch.int64 if name == "totals" else torch.int32 for name in values}
    return {name: torch.tensor(value, dtype=kinds[name], device=device) for name, value in values.items()}


def run_preprocess(state: dict[str, torch.Tensor], idx_mapping: torch.Tensor, q: torch.Tensor, block_tokens: int):
    preprocess_mamba_align_fused(
        idx_mapping, q, state["n"], state["column"], state["accepted"], state["source"], state["bias"],
        state["work_list"], state["work_count"], state["totals"], len(idx_mapping), block_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("num_reqs", [1, 4, 16, 65])
def test_device_decisions_equal_the_column_arithmetic(device, num_reqs):
    rng, B = random.Random(num_reqs), 8
    num_slots = num_reqs + 5
    n = [rng.randrange(0, 60) for _ in range(num_slots)]
    column = [first_column(x, B) + rng.randint(0, 1) * (x > 0) for x in n]
    accepted = [rng.randint(1, 4) for _ in range(num_slots)]
    idx_mapping = [slot if rng.random() < 0.8 else -1 for slot in rng.sample(range(num_slots), num_reqs)]
    q = [rng.randint(1, 12) for _ in range(num_reqs)]
    names = {"n": n, "column": column, "accepted": accepted, "source": [99] * num_slots, "bias": [99] * num_slots}
    names |= {"work_list": [99] * num_slots, "work_count": [99], "totals": [7, 5]}
    state = as_tensors(names, device)
    mapping = torch.tensor(idx_mapping, dtype=torch.int32, device=device)
    reference = {k: v.cpu().clone() for k, v in state.items()}
    run_preprocess(state, mapping, torch.tensor(q, dtype=torch.int32, device=device), B)

    want = {k: list(v) for k, v in names.items()}
    moving = []
    for row, slot in enumerate(idx_mapping):
        if slot >= 0:
            info = precopy(column[slot], n[slot], q[row], accepted[slot], B)
            want["source"][slot], want["column"][slot], want["bias"][slot] = info
            if info.source_column >= 0:
                moving.append(row)
                want["accepted"][slot] = 1
    want["work_list"][: len(moving)], want["work_count"] = moving, [len(moving)]
    want["totals"] = [7 + len(moving), 5 + sum(accepted[idx_mapping[row]] > 1 for row in moving)]
    assert {k: v.tolist() for k, v in state.items()} == want

    preprocess_mamba_align_fused_reference(
        mapping.cpu(), torch.tensor(q, dtype=torch.int32), *(reference[k] for k in ("n", "column", "accepted")),
        *(reference[k] for k in ("source", "bias", "work_list", "work_count", "totals")), num_reqs, B,
    )  # fmt: skip
    assert {k: v.tolist() for k, v in reference.items()} == want


class Text:
    """Rows whose states name the position they are for: temporal after n tokens is n, a conv slot its input's."""

    def __init__(self, case: Case, S: int):
        self.case, self.S = case, S
        self.conv, self.temporal = case.states

    def forward(self, slot: int, n: int, q: int, column: int, accepted: int) -> None:
        """One decode row: check what it reads, then write what it leaves (DESIGN section 2)."""
        row, case = self.case.table[slot, 0].tolist(), self.case
        assert (self.temporal.tensor[row[column + accepted - 1]] == n).all(), (slot, n, q, column, accepted)
        window = case.slots(self.conv, row[column], accepted - 1, accepted + W - 2)
        assert (window == self.inputs(n - (W - 1), n)).all(), (slot, n, q, column, accepted)
        case.slots(self.conv, row[column], 0, W - 1 + self.S).fill_(float("nan"))
        case.slots(self.conv, row[column], 0, W - 2 + q).copy_(self.inputs(n - (W - 2), n + q).expand(-1, 3))
        for j in range(q):
            self.temporal.tensor[row[column + j]] = n + j + 1

    def inputs(self, start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop, device=self.case.device, dtype=torch.float32).clamp(min=-1)[:, None]

    def start(self, slot: int, n: int, column: int) -> None:
        row = self.case.table[slot, 0].tolist()
        self.temporal.tensor[row[column]] = n
        self.case.slots(self.conv, row[column], 0, W - 1).copy_(self.inputs(n - (W - 1), n).expand(-1, 3))

    def check_boundary(self, slot: int, boundary: int, column: int) -> None:
        block = int(self.case.table[slot, 0, column])
        assert (self.temporal.tensor[block] == boundary).all(), (slot, boundary)
        assert (self.case.slots(self.conv, block, 0, W - 1) == self.inputs(boundary - (W - 1), boundary)).all()


@LAYOUTS
def test_alternating_draft_counts_around_a_boundary(device, layout):
    """Every (distance to the boundary, drafts, kept), then one token, then drafts again: n = m-2, q = 4, one kept,
    q = 1 is the one where the running column has moved on and must not move back."""
    S, B = 3, 8
    starts = [(n, q, kept) for n in range(2 * B - 4, 2 * B + 1) for q in (1, 2, 4) for kept in {1, q - 1, q} if kept]
    num = len(starts)
    case = Case(device, layout, num_blocks=num * 8 + 2, width=8)
    case.add("conv", (W - 1 + S, 3)).add("temporal", (2,))
    case.prepare(num)
    text = Text(case, S)
    n = [n for n, _, _ in starts]
    column = [first_column(x, B) for x in n]
    for slot in range(num):
        text.start(slot, n[slot], column[slot])
    names = {"n": n, "column": column, "accepted": [1] * num, "source": [-1] * num, "bias": [0] * num}
    names |= {"work_list": [0] * num, "work_count": [0], "totals": [0, 0]}
    state = as_tensors(names, device)
    mapping = case.int32(case.rng.sample(range(num), num))
    table, states = case.table.to(device), case.table_of_states()
    for q, kept in ((None, None), (1, 1), (4, 2), (4, 4)):
        qs = [(q or starts[slot][1]) for slot in mapping.tolist()]
        keeps = [(kept or starts[slot][2]) for slot in mapping.tolist()]
        run_preprocess(state, mapping, case.int32(qs), B)
        precopy_mamba_align_fused(
            state["source"], state["column"], state["bias"], table, mapping, state["work_list"], state["work_count"],
            num, states,
        )  # fmt: skip
        columns, accepted, before = (state[k].tolist() for k in ("column", "accepted", "n"))
        for row, slot in enumerate(mapping.tolist()):
            text.forward(slot, before[slot], qs[row], columns[slot], accepted[slot])
        postprocess_mamba_fused(
            case.int32(keeps), state["n"], state["column"], state["accepted"], table, mapping, num, B, states
        )
        state["n"][mapping.long()] += case.int32(keeps)
        for row, slot in enumerate(mapping.tolist()):
            boundary = (before[slot] + keeps[row]) // B * B
            if boundary > before[slot]:
                text.check_boundary(slot, boundary, boundary // B - 1)
    assert min(state["accepted"].tolist()) >= 1


def test_a_destination_that_another_row_reads_is_refused(device):
    """Rows run in any order, so a schedule may not let one write what another reads: checked mode asserts it."""
    specs = [StateSpec("0", "conv", (4,), torch.float32)]
    cache = StateCache.allocate(
        [], specs, num_kv_blocks=1, num_mamba_blocks=8, kv_block_tokens=1, mamba_block_tokens=8, conv_layout="DS",
        conv_width=W, num_spec_tokens=3, device=device,
    )  # fmt: skip
    batch = InputBatch(2, 8, 8)
    rows = []
    for i, blocks in enumerate(({0: 1, 1: 2}, {0: 2, 1: 3})):
        batch.add(NewRow(str(i), None, 0, 8, [0] * 8, 8))
        rows.append(ScheduledRow(str(i), 0, 8, [0], True, [], blocks, [], None))
    align_ctx = MambaSpecDecodeGPUContext(cache, 2, 8)
    with pytest.raises(AssertionError, match="writes block 2"):
        preprocess_mamba(SchedulerOutput(rows), batch, cache, align_ctx=align_ctx, checked=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts compiled binaries")
@LAYOUTS
def test_one_binary_serves_every_request_count(device, layout):
    caches = precopy_mamba_align_fused_kernel.device_caches
    case = small_case(device, layout, 65)
    case.decide_randomly(3)
    counts = []
    for num_reqs in (64, 1, 16, 65):
        case.run_precopy(num_reqs=num_reqs)
        counts.append(sum(len(cache[0]) for cache in caches.values()))
    assert len(set(counts)) == 1, counts
