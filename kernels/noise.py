"""Counter-based noise: a function of (seed, choice, position, token id) alone, the same on every device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = 2**64 - 1


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


GOLDEN: tl.constexpr = tl.constexpr(_signed(_GOLDEN))
MIX_1: tl.constexpr = tl.constexpr(_signed(_MIX_1))
MIX_2: tl.constexpr = tl.constexpr(_signed(_MIX_2))


def stream_key(seed: int, choice: int) -> int:
    """Hash (seed, choice) to what `position_keys` goes on from; a signed 64-bit number."""
    key = 0
    for value in (seed, choice):
        z = ((key ^ (value & _MASK_64)) + _GOLDEN) & _MASK_64
        z = ((z ^ (z >> 30)) * _MIX_1) & _MASK_64
        z = ((z ^ (z >> 27)) * _MIX_2) & _MASK_64
        key = z ^ (z >> 31)
    return _signed(key)


def position_keys(stream_keys: Tensor, positions: Tensor) -> Tensor:
    """Keys int64 of the noise at absolute positions int64 of the streams with `stream_keys` int64."""
    return noise_bits(stream_keys ^ positions, torch.zeros_like(positions))


def noise_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Counter-based random bits: SplitMix64's output number `token_id` of the stream that starts at `key`.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16 (with
    the constants of Stafford's Mix13). int64 arithmetic that wraps: the same bits on every device.

    Args:
        keys: int64, broadcast against token_ids.
        token_ids: int64.

    Returns:
        int64, all 64 bits random.
    """
    z = (token_ids + 1) * GOLDEN.value + keys
    z ^= _shift_right(z, 30)
    z *= MIX_1.value
    z ^= _shift_right(z, 27)
    z *= MIX_2.value
    z ^= _shift_right(z, 31)
    return z


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, -log(-log(u)) in fp64, u = (52 bits of `noise_bits` + 1/2) / 2**52, never 0 or 1.

    fp64 leaves devices whose logarithms differ in the last place about 1e-14 of a chance to disagree on a
    token. Shapes as `noise_bits`.
    """
    uniform = _shift_right(noise_bits(keys, token_ids), 12).double()
    return uniform.add_(0.5).mul_(2.0**-52).log_().neg_().log_().neg_()


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift of int64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


@triton.jit
def gumbel_of(key, o_token):
    """`gumbel_noise` of one key and tokens int64, in a kernel."""
    b_z = (o_token + 1) * GOLDEN + key
    b_z ^= (b_z >> 30) & 0x3FFFFFFFF
    b_z *= MIX_1
    b_z ^= (b_z >> 27) & 0x1FFFFFFFFF
    b_z *= MIX_2
    b_z ^= (b_z >> 31) & 0x1FFFFFFFF
    b_uniform = (((b_z >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
    return -tl.log(-tl.log(b_uniform))
