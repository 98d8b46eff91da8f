"""Memory of both pools that holds no numbers: each value is the name of the text that it is made of.

A state is named by its prefix: so is the value of every KV slot (the tokens up to its own), drafter slot, conv input,
temporal state and carry. What was never written is POISON. The model is a pure function of the prefix. In the place of
a temporal state may lie the `Inputs` that it is made of.

Where a prompt is scanned by chunks, the name also says where the chunk of each token began: to other bits it is another
state.
"""

from dataclasses import dataclass, field

from mambalign.worker.sampling_params import SamplingParams

POISON = None  # never written since the block was handed out, or undefined by the rules
ZERO = 0  # conv input of a position before the text
NO_TOKENS = 1  # the state of the empty text

Value = int | None


@dataclass(frozen=True)
class Inputs:
    """What the recurrence takes of a prefix's last token: with the state before that token it makes `state`."""

    state: int


def extend(state: int, token_id: int, chunk_start: int | None = None) -> int:
    """The state after one more token. A 61-bit hash stands for the tokens: equal for equal texts only.

    `chunk_start`: position of the first token of the chunk that it is scanned in; None: it is scanned by itself.
    """
    return hash((state, token_id, chunk_start))


def states_of(token_ids: list[int], num_prompt_tokens: int = 0, chunk_tokens: int | None = None) -> list[int]:
    """The states after 0, 1, ... len(token_ids) tokens; with `chunk_tokens` the prompt's are scanned by chunks."""
    states = [NO_TOKENS]
    for position, token_id in enumerate(token_ids):
        by_chunk = chunk_tokens is not None and position < num_prompt_tokens
        states.append(extend(states[-1], token_id, position // chunk_tokens * chunk_tokens if by_chunk else None))
    return states


def true_token(state: int, params: SamplingParams, choice: int, vocab_size: int) -> int:
    """The model: what follows a text, by seed and choice."""
    return hash((state, params.seed, choice)) % vocab_size


def true_text(
    prompt: list[int],
    params: SamplingParams,
    choice: int,
    vocab_size: int,
    num_tokens: int,
    chunk_tokens: int | None = None,
) -> list[int]:
    """The first `num_tokens` tokens of output: one at a time, no batch, no cache, no drafts."""
    state, output = states_of(prompt, len(prompt), chunk_tokens)[-1], []
    for _ in range(num_tokens):
        output.append(true_token(state, params, choice, vocab_size))
        state = extend(state, output[-1])
    return output


@dataclass(frozen=True)
class SymbolicLimits:
    max_num_seqs: int
    max_model_len: int
    num_spec_tokens: int
    conv_width: int
    kv_block_tokens: int
    mamba_block_tokens: int
    num_kv_blocks: int  # null block included
    num_mamba_blocks: int
    num_lookahead_tokens: int  # 0: no drafter fills slots
    schedules_ahead: bool = False  # decode rows come without position and tokens, as runner V2 gets them
    vocab_size: int = 3
    chunk_tokens: int | None = None  # prompts are scanned by chunks of so many tokens

    @property
    def state_len(self) -> int:
        return self.conv_width - 1 + self.num_spec_tokens


@dataclass
class Memory:
    """Both pools. Conv slots are in slot order, the layouts SD and DS do not differ here."""

    limits: SymbolicLimits
    kv: list[list[Value]] = field(init=False)
    drafter: list[list[Value]] = field(init=False)
    temporal: list[Value | Inputs] = field(init=False)
    carry: list[Value] = field(init=False)
    conv: list[list[Value]] = field(init=False)

    def __post_init__(self) -> None:
        limits = self.limits
        self.kv = [[POISON] * limits.kv_block_tokens for _ in range(limits.num_kv_blocks)]
        self.drafter = [[POISON] * limits.kv_block_tokens for _ in range(limits.num_kv_blocks)]
        self.temporal = [POISON] * limits.num_mamba_blocks
        self.carry = [POISON] * limits.num_mamba_blocks
        self.conv = [[POISON] * limits.state_len for _ in range(limits.num_mamba_blocks)]

    def poison_kv(self, block: int) -> None:
        self.kv[block] = [POISON] * self.limits.kv_block_tokens
        self.drafter[block] = [POISON] * self.limits.kv_block_tokens

    def poison_state(self, block: int) -> None:
        self.temporal[block] = self.carry[block] = POISON
        self.conv[block] = [POISON] * self.limits.state_len

    def put_state(self, block: int, state: int, window: list[Value]) -> None:
        """Temporal state, carry and conv window of one position; conv slots past the window become undefined."""
        self.temporal[block] = self.carry[block] = state
        self.put_conv(block, window)

    def put_conv(self, block: int, slots: list[Value]) -> None:
        assert len(slots) <= self.limits.state_len, "more conv inputs than slots"
        self.conv[block] = slots + [POISON] * (self.limits.state_len - len(slots))

    def contents_of_kv(self, block: int) -> tuple[Value, ...]:
        return (*self.kv[block], *self.drafter[block])

    def contents_of_state(self, block: int) -> tuple[Value | Inputs, ...]:
        return (self.temporal[block], self.carry[block], *self.conv[block])
