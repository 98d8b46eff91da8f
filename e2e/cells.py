"""The cells of the prefix-cache suite: which engines it runs over. Everything that a cell varies is chosen here."""

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mambalign.engine.capacity import states_for_one
from mambalign.engine.checkpoint import locate
from mambalign.engine.option import flag
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.nemotron_h import NemotronH
from mambalign.worker.models.registry import load_model
from mambalign.worker.state_cache import bytes_per_kv_block, bytes_per_state

RUNNERS = ("v1", "v2")
LAYOUTS = ("SD", "DS")
SPEC_TOKENS = (0, 1, 3, 7)
SPEC_METHODS = ("mtp", "ngram")
MAX_MODEL_LEN = 512
WINDOW = 3  # W-1: conv inputs that a state remembers


@dataclass(frozen=True)
class Pools:
    """Blocks that an engine has, null blocks not counted."""

    name: str
    num_states: int
    num_kv_blocks: int
    max_model_len: int = MAX_MODEL_LEN


@dataclass(frozen=True)
class Cell:
    """One engine configuration. S, the layout and the drafts' source are the matrix; the rest is spread over it."""

    runner: str
    layout: str
    spec_tokens: int
    spec_method: str
    block_tokens: int  # B
    kv_block_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int

    @property
    def name(self) -> str:
        drafts = f"{self.spec_method}{self.spec_tokens}" if self.spec_tokens else "nodrafts"
        return f"{self.runner}-{self.layout}-{drafts}-B{self.block_tokens}-C{self.max_num_batched_tokens}"

    @property
    def combination(self) -> tuple[str, str, int, str]:
        """Its place in the matrix."""
        return self.runner, self.layout, self.spec_tokens, self.spec_method if self.spec_tokens else ""

    def cached(self, num_tokens: int, num_seen: int | None = None) -> int:
        """The hit law: tokens that a prompt takes from the cache, of which the first `num_seen` were seen before."""
        num_shared = min(num_tokens - 1, num_tokens if num_seen is None else num_seen)
        return num_shared // self.block_tokens * self.block_tokens

    def pools(self, name: str) -> Pools:
        """roomy: everything stays cached. tight: two requests push each other out, and few more wrap the pools."""
        size, steps_ahead = self.kv_block_tokens, 2 if self.runner == "v2" else 1
        states_for_one_request = states_for_one(self.spec_tokens, self.runner == "v2")
        if name != "tight":
            return Pools(name, 96 + 8 * states_for_one_request, 4096 // size)
        prompt, reply = self.block_tokens + 9, max(40, self.block_tokens)
        admitted = -(-(prompt + self.spec_tokens + 1) // size)
        longest = -(-(prompt + reply + steps_ahead * self.spec_tokens + max(1, self.spec_tokens)) // size)
        return Pools(name, 2 * states_for_one_request + 2, max(longest, 2 * admitted + 1), prompt + reply)

    def options(self, pools: Pools, model: HybridModel | None = None) -> dict[str, Any]:
        """As `LLM` takes them, but for the name of the model; None: that ships."""
        return {
            "dtype": "float32",
            "device": "cpu",
            "runner": self.runner,
            "check_fused_copy": True,
            "mamba_conv_layout": self.layout,
            "spec_tokens": self.spec_tokens,
            "spec_method": self.spec_method,
            "mamba_block_size": self.block_tokens,
            "kv_block_size": self.kv_block_tokens,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": pools.max_model_len,
            **pool_memory(
                model or default_model(),
                self.spec_tokens,
                self.spec_method,
                self.kv_block_tokens,
                pools.num_states,
                pools.num_kv_blocks,
            ),
            **self._cache_switch(pools),
        }

    def arguments(self, pools: Pools) -> list[str]:
        """As the command line takes them."""
        arguments: list[str] = []
        for name, value in self.options(pools).items():
            if not isinstance(value, bool):
                arguments += [flag(name), str(value)]
            elif name == "enable_prefix_caching":
                arguments.append(flag(name) if value else flag(f"no_{name}"))
            elif value:
                arguments.append(flag(name))
        return arguments

    def _cache_switch(self, pools: Pools) -> dict[str, Any]:
        """Pools named "off" serve without prefix caching, in the DS cells without keeping any boundary either."""
        if pools.name != "off":
            return {}
        if self.layout == "SD":
            return {"enable_prefix_caching": False}
        return {"mamba_cache_mode": "none", "check_fused_copy": False}


def pool_memory(
    model: HybridModel,
    spec_tokens: int,
    spec_method: str,
    kv_block_tokens: int,
    num_states: int,
    num_kv_blocks: int,
) -> dict[str, Any]:
    """The options for one budget, and its split, that make exactly these pools; null blocks not counted."""
    with_drafter = spec_tokens > 0 and spec_method == "mtp"
    specs = model.state_specs(torch.float32, with_drafter=with_drafter)
    state = bytes_per_state(specs, model.conv_width, spec_tokens)
    kv_block = bytes_per_kv_block(model.attention_specs(with_drafter=with_drafter), kv_block_tokens)
    usable = num_states * state + num_kv_blocks * kv_block
    return {
        "cache_memory": usable + state + kv_block,  # and the two null blocks
        "mamba_cache_fraction": (num_states * state + min(state, kv_block) // 2) / usable,
    }


@functools.cache
def default_path() -> Path:
    return locate(None)


@functools.cache
def default_model() -> NemotronH:
    """The model that ships, shared by the engines of this process."""
    return load_model(default_path(), torch.float32, "cpu", show_progress=False)


# (B, KV block, budget, rows), dealt to the cells of the matrix in turn.
_SHAPES = ((16, 16, 64, 8), (32, 16, 2048, 4), (32, 8, 64, 3), (16, 16, 2048, 8), (16, 8, 96, 2))


def local_cells() -> list[Cell]:
    """{runners} x {layouts} x {S} x {methods}; S = 0 has no method. The first `NUM_LOCAL_CELLS` hold each
    {runner, layout, S} and each {layout, S, method}; one of them has B = 128.
    """
    first, rest = [], []
    shapes = itertools.cycle(_SHAPES)
    for layout, spec_tokens, method, runner in itertools.product(LAYOUTS, SPEC_TOKENS, SPEC_METHODS, RUNNERS):
        if spec_tokens == 0 and method != SPEC_METHODS[0]:
            continue
        parity = LAYOUTS.index(layout) + SPEC_METHODS.index(method) + RUNNERS.index(runner)
        is_first = spec_tokens == 0 or parity % 2 == 0
        shape = next(shapes)
        if (layout, spec_tokens, method, runner) == ("DS", 3, "mtp", "v2"):
            shape = (128, 16, 192, 4)
        (first if is_first else rest).append(Cell(runner, layout, spec_tokens, method, *shape))
    return first + rest


def server_cells() -> list[Cell]:
    """All of `local_cells`' combinations; the first `NUM_SERVER_CELLS` are a pairwise cover of them."""
    first = []
    for i, spec_tokens in enumerate(SPEC_TOKENS):
        for j, layout in enumerate(LAYOUTS):
            method = SPEC_METHODS[(i + j) % 2]
            runner = RUNNERS[(i // 2 + j) % 2]
            shape = _SHAPES[(i + 2 * j) % len(_SHAPES)]
            first.append(Cell(runner, layout, spec_tokens, method, *shape))
    covered = {cell.combination for cell in first}
    return first + [cell for cell in local_cells() if cell.combination not in covered]


NUM_LOCAL_CELLS = len(LAYOUTS) * len(RUNNERS) * len(SPEC_TOKENS)
NUM_SERVER_CELLS = len(LAYOUTS) * len(SPEC_TOKENS)


def cell_params(cells: list[Cell], num_default: int) -> list[Any]:
    """As pytest's `params`: the first `num_default` always run, the others with --all."""
    return [
        pytest.param(cell, id=cell.name, marks=[pytest.mark.slow] if i >= num_default else [])
        for i, cell in enumerate(cells)
    ]
