"""Heads to their places in one launch: the bits of one part after the other, and what must stay as it was."""

import pytest
import torch

from mambalign.kernels.head_norm import HeadNorms, norm_heads
from mambalign.kernels.place_heads import place_heads, place_heads_on_gpu
from mambalign.kernels.rotary import rotary_embed, rotary_table
from mambalign.kernels.tolerances import tolerance

SIZES = [(1, 1, 4, 2), (6, 2, 10, 5), (3, 1, 33, 8), (4, 2, 64, 32), (4, 1, 256, 32)]  # heads, kv heads, dim, half
SLOTS = [7, -1, 29, 0, -3, 12, 13]
DTYPES = [torch.float32, torch.bfloat16]


class Heads:
    """Tokens as views of one projection, and an empty cache."""

    def __init__(self, num_heads: int, kv_heads: int, head_dim: int, half: int, dtype: torch.dtype, device: str):
        generator = torch.Generator().manual_seed(head_dim)
        self.widths = [num_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim, num_heads * head_dim]
        self.head_dim, self.device = head_dim, device
        self.given = torch.randn(len(SLOTS), sum(self.widths), generator=generator).to(device, dtype)
        self.slots = torch.tensor(SLOTS, device=device)
        self.positions = torch.randint(0, 44, (len(SLOTS),), generator=generator).to(device)  # some past the table
        weights = torch.randn(2, head_dim, generator=generator).to(device)
        self.norms = HeadNorms(*weights, 1e-6)
        self.table = rotary_table(1.0 / 50.0 ** (torch.arange(half) / half), 1.25, 40).to(device)

    def run(self, place, norm: bool, rotary: bool, given: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """The projection [T, width] and the caches [2, 32, kv_heads, head_dim] after it."""
        tokens = (self.given if given is None else given).clone()
        *qkv, _ = (x.unflatten(1, (-1, self.head_dim)) for x in tokens.split(self.widths, 1))
        caches = tokens.new_zeros(2, 8, 4, *qkv[1].shape[1:])
        norms, table = self.norms if norm else None, self.table if rotary else None
        place(*qkv, *caches, self.slots, self.positions, norms, table)
        return tokens, caches.flatten(1, 2)

    def parts(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        return [x.unflatten(1, (-1, self.head_dim)) for x in tokens.split(self.widths, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("norm", "rotary"), [(False, False), (True, False), (False, True), (True, True)])
def test_kernel_and_cpu_agree(sizes, dtype: torch.dtype, norm: bool, rotary: bool, device: str) -> None:
    on_cpu, on_gpu = (Heads(*sizes, dtype, where) for where in ("cpu", device))
    want, want_caches = on_cpu.run(place_heads, norm, rotary)
    got, caches = on_gpu.run(place_heads_on_gpu, norm, rotary)
    close = tolerance("kernel", dtype)
    torch.testing.assert_close(on_gpu.parts(got)[0].cpu(), on_cpu.parts(want)[0], **close)
    torch.testing.assert_close(caches[0].cpu(), want_caches[0], **close)
    assert torch.equal(caches[1].cpu(), want_caches[1])
    first = sizes[0] * sizes[2]
    assert torch.equal(got[:, first:], on_gpu.given[:, first:])
    used = torch.tensor([slot for slot in SLOTS if slot >= 0])
    assert caches[0, used].count_nonzero() and caches.count_nonzero() == caches[:, used].count_nonzero()
    if not norm and not rotary:
        assert torch.equal(got, on_gpu.given) and torch.equal(caches.cpu(), want_caches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_are_those_of_one_part_after_the_other(sizes, dtype: torch.dtype, device: str) -> None:
    heads = Heads(*sizes, dtype, device)
    whole, caches = heads.run(place_heads_on_gpu, True, True)
    normed, normed_caches = heads.run(place_heads_on_gpu, True, False)
    written = heads.slots >= 0
    heads.parts(normed)[1][written] = normed_caches[0, heads.slots[written]]  # the kernel leaves keys as they were
    turned, turned_caches = heads.run(place_heads_on_gpu, False, True, normed)
    assert torch.equal(heads.parts(turned)[0], heads.parts(whole)[0]) and torch.equal(turned_caches, caches)


def test_a_token_alone_gives_the_bits_of_the_batch(device: str) -> None:
    for place, where in ((place_heads, "cpu"), (place_heads_on_gpu, device)):
        heads = Heads(6, 2, 33, 16, torch.float32, where)
        whole, caches = heads.run(place, True, True)
        given, slots, positions = heads.given, heads.slots, heads.positions
        for token, slot in enumerate(SLOTS):
            here = slice(token, token + 1)
            heads.slots, heads.positions = slots[here], positions[here]
            alone, own_caches = heads.run(place, True, True, given[here])
            assert torch.equal(heads.parts(alone)[0], heads.parts(whole)[0][here])
            assert torch.equal(own_caches[:, max(slot, 0)], caches[:, slot] * (slot >= 0))


def test_the_references_are_what_a_cpu_runs() -> None:
    heads = Heads(6, 2, 33, 8, torch.float32, "cpu")
    got, caches = heads.run(place_heads, True, True)
    want = heads.given.clone()
    query, key, value, _ = heads.parts(want)
    norm_heads(query, key, heads.norms)
    rotary_embed(query, key, heads.positions, heads.table)
    assert torch.equal(got, want)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            assert torch.equal(caches[0, slot], key[token]) and torch.equal(caches[1, slot], value[token])


def test_what_does_not_fit_is_refused() -> None:
    slots, caches = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, 4, 1, 8).unbind()
    query, key, weight, table = torch.ones(2, 3, 8), torch.ones(2, 1, 8), torch.ones(8), torch.ones(4, 2, 4)

    def place(query=query, key=key, value=key, norms=None, table=None) -> None:
        place_heads(query, key, value, *caches, slots, slots, norms, table)

    place(norms=HeadNorms(weight, weight, 1e-6), table=table)
    for wrong in (
        {"query": query.mT.contiguous().mT},
        {"key": key[..., :7]},
        {"key": key.half()},
        {"key": torch.ones(2, 2, 8)},
        {"value": torch.ones(1, 1, 8)},
        {"norms": HeadNorms(weight, torch.ones(7), 1e-6)},
        {"table": torch.ones(4, 2, 5)},
    ):
        with pytest.raises(ValueError):
            place(**wrong)
