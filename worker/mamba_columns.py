"""Column arithmetic of DESIGN section 2: pure integers, shared by scheduler, runners and tests.

n = tokens whose KV and state are final, q = tokens of the step, a = tokens kept from the row's last step,
c = its running column, B = mamba block tokens. Column k of a row holds the state after (k+1)*B tokens once full.
"""

from typing import NamedTuple

NULL_BLOCK = 0  # of either pool, never handed out: a table entry of 0 means "no block"


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def first_column(n: int, block_tokens: int) -> int:
    """Running column of a row before any step of its life: -1 when nothing is computed."""
    return cdiv(n, block_tokens) - 1


def next_column(c: int, n: int, q: int, block_tokens: int) -> int:
    """Running column of a step of q tokens. It never moves back, also after rejected drafts."""
    return max(c, cdiv(n + q, block_tokens) - 1)


class PrecopyInfo(NamedTuple):
    """One row's pre-copy decision. `source_column` is -1 for a row that moves nothing.

    Temporal states and carries move `block[source_column + token_bias] -> block[dest_column]`; conv states move
    `block[source_column]`, shifted left by `token_bias` slots, `-> block[dest_column]`.
    """

    source_column: int
    dest_column: int
    token_bias: int


def precopy(c: int, n: int, q: int, a: int, block_tokens: int) -> PrecopyInfo:
    """What must move before a step: everything when the running column changes, else nothing."""
    dest = next_column(c, n, q, block_tokens)
    moves = c >= 0 and c != dest
    return PrecopyInfo(c if moves else -1, dest, a - 1)


class PostcopyInfo(NamedTuple):
    """The copy after sampling that keeps the state at boundary `boundary`, `token_bias + 1` tokens into the step."""

    boundary: int
    source_column: int
    dest_column: int
    token_bias: int

    @property
    def move(self) -> PrecopyInfo | None:
        """What moves bytes; None when the boundary's state lies in its column already."""
        if self.dest_column == self.source_column and self.token_bias == 0:
            return None
        return PrecopyInfo(self.source_column, self.dest_column, self.token_bias)


def postcopy(c: int, n: int, num_kept: int, block_tokens: int) -> PostcopyInfo | None:
    """Copy owed by a decode row in running column `c` that kept `num_kept` tokens; None when it crossed nothing.

    When `dest_column == source_column` the row ends exactly on the boundary, and its `num_accepted` becomes 1.
    """
    boundary = (n + num_kept) // block_tokens * block_tokens
    if boundary <= n:
        return None
    return PostcopyInfo(boundary, c, boundary // block_tokens - 1, boundary - n - 1)


def decode_columns(n: int, c: int, q: int, block_tokens: int, num_spec_tokens: int, slack: int = 0) -> range:
    """Columns that a decode row holds during a step; its pre-copy source, `c`, comes on top until copied.

    `slack`: how far n may lie above the given one, when the step before is still in flight.
    """
    running = next_column(c, n + slack, q, block_tokens)
    return range(n // block_tokens, running + num_spec_tokens + 1)


def table_width(max_len: int, block_tokens: int, num_spec_tokens: int) -> int:
    """Columns of a block-table row."""
    return cdiv(max_len + num_spec_tokens, block_tokens) + num_spec_tokens
