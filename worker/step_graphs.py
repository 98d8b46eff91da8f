"""Steps as CUDA graphs: one launch for the target's pass, one for the drafter's.

A decode graph runs a fixed number of rows of S+1 tokens each, over tensors of its own. A step of fewer rows, or of rows
with fewer drafts, is copied in; what is left over is inert: rows without tokens, and tokens behind a row's last. A
prompt graph (`prompt_graph.py`) runs one row of a prompt in the same way. Without CUDA the same padded step is run
launch by launch (so that padding can be tested anywhere).
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch

from mambalign.kernels.gather_rows import gather_rows
from mambalign.kernels.padded_rows import pad_sampled
from mambalign.worker.forward_batch import NO_BLOCK, NO_TOKEN, StepLayout, StepRows
from mambalign.worker.padded_step import PaddedStep
from mambalign.worker.prompt_graph import SIZES, PromptGraph

LARGEST = 256  # rows


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Row counts to capture: dense where a padded row costs most."""
    most = min(max_num_seqs, LARGEST)
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, LARGEST + 1, 32)]
    return [size for size in sizes if size < most] + [most]


class DecodeGraph(PaddedStep):
    """`num_rows` rows of `num_spec_tokens + 1` tokens: their inputs, and the two captured passes."""

    def __init__(
        self,
        num_rows: int,
        num_spec_tokens: int,
        num_columns: int,
        num_kv_blocks: int,
        max_context_len: int,
        device: torch.device,
    ):
        width, int32 = num_spec_tokens + 1, dict(dtype=torch.int32, device=device)
        num_tokens = num_rows * width
        rows, tokens = torch.arange(num_rows, device=device), torch.arange(num_tokens, device=device)
        numbers = torch.zeros(4, num_rows, **int32)
        self.num_final = torch.zeros(num_rows, **int32)
        self.sampled = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        layout = StepLayout(
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_samples=num_tokens,
            max_query_len=width,
            max_context_len=max_context_len,
            all_decode=True,
            query_start=(rows * width).int(),
            query_len=numbers[0],
            is_decode=torch.ones(num_rows, **int32),
            samples_of_row=numbers[0],
            sample_start=(rows * width).int(),
            drafting=rows,
            resumed=rows[:0],
            row_of_token=tokens // width,
            offset_of_token=tokens % width,
            token_ids=torch.zeros_like(tokens),
            next_token_ids=torch.full_like(tokens, NO_TOKEN),
            boundary_block=torch.full_like(tokens, NO_BLOCK),
            sample_index=tokens,
            kv_table=torch.zeros(num_rows, num_kv_blocks, **int32),
        )
        super().__init__(layout, numbers, num_columns)

    def take(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """[T, width] of the step's own tokens, which are all of the graph's when every row has all its drafts."""
        num_tokens = self._given.num_tokens
        return of_tokens if num_tokens == len(of_tokens) else gather_rows(of_tokens, self._place[:num_tokens])

    def put_sampled(self, sampled: torch.Tensor, num_final: torch.Tensor) -> None:
        """Copy in what the drafter's pass needs: tokens int64 [T], and how many of each row's are final, int32 [R]."""
        given = self._given
        pad_sampled(given.query_start, given.query_len, sampled, num_final, self.sampled, self.num_final)


Graph = DecodeGraph | PromptGraph


class StepGraphs:
    """Graphs of every size for one `ModelStep`. They share one memory pool: only one runs at a time."""

    def __init__(
        self,
        forward: Callable[[StepRows], torch.Tensor],
        propose: Callable[[StepRows, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None,
        sizes: list[int],
        most_prompt_tokens: int,
        by_chunk: bool,
        num_spec_tokens: int,
        num_columns: int,
        kv_block_tokens: int,
        num_kv_blocks: int,
        device: torch.device,
    ):
        """forward(rows) -> hidden; propose(rows, hidden, sampled, num_final) -> drafts, None without a drafter.

        sizes: rows of decode steps. most_prompt_tokens: of a step. num_columns, num_kv_blocks: the widest block tables
        of a row.
        """
        self._forward, self._propose = forward, propose
        tables = num_columns, num_kv_blocks, num_kv_blocks * kv_block_tokens
        self._sizes = sizes
        self._of_decodes = [DecodeGraph(n, num_spec_tokens, *tables, device) for n in sizes]
        self._of_prompts = [PromptGraph(n, *tables, by_chunk, device) for n in SIZES if n <= most_prompt_tokens]
        self.num_steps = self.num_prompt_steps = 0  # run since start
        self._hidden: dict[Graph, torch.Tensor] = {}
        self._captured: dict[tuple[str, Graph], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        if device.type == "cuda":
            self._capture()

    def pick(self, rows: StepRows) -> Graph | None:
        """The smallest graph that holds a step of decode rows, or of a prompt's last piece; None for any other step."""
        layout = rows.layout
        if not layout.all_decode:
            return next((graph for graph in self._of_prompts if graph.holds(layout)), None)
        if layout.num_rows > self._sizes[-1]:
            return None
        return self._of_decodes[bisect_left(self._sizes, layout.num_rows)]

    def forward(self, graph: Graph, rows: StepRows) -> torch.Tensor:
        """Hidden states [T, hidden] of the step's own tokens; read them before the next step."""
        self.num_steps += 1
        self.num_prompt_steps += isinstance(graph, PromptGraph)
        graph.load(rows)
        hidden = self._run("forward", graph, partial(self._forward, graph.rows))
        self._hidden[graph] = hidden
        return graph.take(hidden)

    def propose(self, graph: Graph, sampled: torch.Tensor, num_final: torch.Tensor) -> torch.Tensor:
        """Drafts int64 [R, S] of the step that `forward` has run last; read them before the next step."""
        graph.put_sampled(sampled, num_final)
        return self._run("propose", graph, partial(self._run_propose, graph))[: len(num_final)]

    def _run_propose(self, graph: Graph) -> torch.Tensor:
        return self._propose(graph.rows, self._hidden[graph], graph.sampled, graph.num_final)

    def _run(self, name: str, graph: Graph, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        if (name, graph) not in self._captured:
            return run()
        captured, output = self._captured[name, graph]
        captured.replay()
        return output

    def _capture(self) -> None:
        """Capture every size, the largest first, so that the smaller ones find its memory. All rows are inert."""
        pool = torch.cuda.graph_pool_handle()
        graphs = [*self._of_decodes, *self._of_prompts]
        for graph in sorted(graphs, key=lambda graph: graph.rows.layout.num_tokens, reverse=True):
            self._hidden[graph] = self._capture_one("forward", graph, pool, partial(self._forward, graph.rows))
            if self._propose is not None:
                self._capture_one("propose", graph, pool, partial(self._run_propose, graph))

    def _capture_one(self, name: str, graph: Graph, pool, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        run()  # compiles what is not compiled yet
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, pool=pool):
            output = run()
        self._captured[name, graph] = captured, output
        return output
