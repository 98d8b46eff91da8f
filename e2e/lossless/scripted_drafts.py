"""Drafts that are written down beforehand, in place of what a runner proposes; the proposer still runs."""

from collections.abc import Callable
from typing import Any

import torch

from mambalign.worker.batch import ScheduledRow, SchedulerOutput
from mambalign.worker.forward_batch import NO_TOKEN, StepRows
from mambalign.worker.model_step import Verified
from mambalign.worker.runner_v1 import ModelRunnerV1
from mambalign.worker.runner_v2 import ModelRunnerV2

DraftsOf = Callable[[str, int], list[int]]  # request id, tokens of its text -> what is drafted to follow


def script_drafts(runner: ModelRunnerV1 | ModelRunnerV2, drafts_of: DraftsOf) -> None:
    """Replace the runner's proposals from now on."""
    execute, propose = runner.execute_model, runner._propose
    step_rows: list[ScheduledRow] = []

    def execute_model(scheduled: SchedulerOutput) -> Any:
        nonlocal step_rows
        step_rows = scheduled.rows  # V1 puts them into batch order, in place
        return execute(scheduled)

    def drafts(rows: StepRows, num_final: Any) -> list[list[int]]:
        lengths = (rows.num_computed + torch.as_tensor(num_final, dtype=torch.int32) + 1).tolist()
        return [
            drafts_of(row.request_id, length) if row.num_samples else []
            for row, length in zip(step_rows, lengths, strict=True)
        ]

    def propose_v1(rows: StepRows, hidden: Any, sampled: Any, num_final: list[int], *rest: Any) -> list[list[int]]:
        propose(rows, hidden, sampled, num_final, *rest)
        return drafts(rows, num_final)

    def propose_v2(rows: StepRows, hidden: Any, sampled: Any, verified: Verified) -> torch.Tensor:
        proposed = torch.full_like(propose(rows, hidden, sampled, verified), NO_TOKEN)
        for i, tokens in enumerate(drafts(rows, verified.num_final)):
            proposed[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        return proposed

    runner.execute_model = execute_model
    runner._propose = propose_v1 if isinstance(runner, ModelRunnerV1) else propose_v2
