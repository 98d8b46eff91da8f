"""The inputs of a captured step: a fixed number of rows and tokens, into which smaller steps are copied."""

import torch

from mambalign.kernels.padded_rows import pad_rows
from mambalign.worker.forward_batch import StepLayout, StepRows


class PaddedStep:
    """Tensors of `layout`, whose rows' numbers are `numbers` int32 [4, R], and state tables of `num_columns`."""

    def __init__(self, layout: StepLayout, numbers: torch.Tensor, num_columns: int):
        self.numbers = numbers  # as `pad_rows` writes them: query_len, which the layout has too, and those of the rows
        table = torch.zeros(layout.num_rows, num_columns, dtype=torch.int32, device=numbers.device)
        self.rows = StepRows(layout, *numbers[1:], table, layout.token_ids)
        self._place = torch.zeros_like(layout.token_ids)  # of each of the step's tokens, among these
        self._given = layout  # of the step

    def load(self, rows: StepRows) -> None:
        """Copy a step in; rows past its last become inert, and so do tokens past a row's."""
        given, layout = rows.layout, self.rows.layout
        self._given = given
        pad_rows(
            given.query_start,
            given.query_len,
            rows.num_computed,
            rows.running_column,
            rows.num_accepted,
            rows.token_ids,
            rows.mamba_table,
            given.kv_table,
            self.numbers,
            self.rows.token_ids,
            self._place,
            self.rows.mamba_table,
            layout.kv_table,
        )
