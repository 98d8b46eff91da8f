"""Four rows of a recurrent state through one token, as explicit vector code.

Written as vectors of 16 lanes, so that the order of every sum is on the page and no vectoriser decides it: lane l adds
the products of the elements l, l + 16, .. with fused multiply-adds, then lanes are added in halves (8, 4, 2, 1). LLVM
maps the vectors to whatever the processor has, with the same bits.
"""

from contextlib import contextmanager

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mambalign.kernels.cpu.vectors import FLOAT, INDEX, broadcast, multiply_add

LANES, ROWS = 16, 4
PLACE = ir.IntType(64)
VECTOR, FOUR = ir.VectorType(FLOAT, LANES), ir.VectorType(FLOAT, ROWS)


@intrinsic
def as_pointer(typing, address):
    return types.voidptr(types.int64), lambda _c, builder, _s, arguments: builder.inttoptr(
        arguments[0], cgutils.voidptr_t
    )


@intrinsic
def scan_four_rows(typing, state, B, C, x, y, first_row, num_chunks, decay, dt, D):
    """A Mamba-2 step, per row p of the four: h = decay * h + (dt * x) * B, in place; y[p] = sum(h * C) + D * x[p].

    All arrays flat, fp32: state rows of `num_chunks` x 16 elements, B and C one such row, x and y one element a row.
    """
    signature = types.void(state, B, C, x, y, types.int64, types.int64, types.float32, types.float32, types.float32)
    return signature, _scan_four_rows


@intrinsic
def delta_four_rows(typing, state, k, q, v, o, first_row, num_chunks, decay, beta, kq):
    """A step of the gated delta rule, per row p of the four: d = beta * (v[p] - decay * sum(h * k)),
    o[p] = decay * sum(h * q) + d * kq, and then h = decay * h + d * k, in place.

    All arrays flat, fp32: state rows of `num_chunks` x 16 elements, k and q one such row, v and o one element a row.
    """
    signature = types.void(state, k, q, v, o, types.int64, types.int64, types.float32, types.float32, types.float32)
    return signature, _delta_four_rows


@intrinsic
def dot(typing, a, b, num_chunks):
    """sum(a * b) over `num_chunks` x 16 elements of two flat fp32 arrays."""
    return types.float32(a, b, types.int64), _dot


class _Code:
    """Vector instructions, written into a function that is being compiled."""

    def __init__(self, context, builder, signature, arrays):
        self.builder = builder
        self.bases = [
            context.make_array(kind)(context, builder, array).data
            for kind, array in zip(signature.args, arrays, strict=False)
        ]

    def _at(self, base, offset, vector):
        return self.builder.bitcast(self.builder.gep(base, [offset]), vector.as_pointer())

    def load(self, base, offset, vector=VECTOR):
        return self.builder.load(self._at(base, offset, vector), align=4, typ=vector)

    def store(self, value, base, offset):
        self.builder.store(value, self._at(base, offset, value.type), align=4)

    def fma(self, a, b, c):
        return multiply_add(self.builder, a, b, c)

    def splat(self, value, vector=VECTOR):
        return broadcast(self.builder, value, vector)

    def splat_each(self, rows):
        """Four vectors, of each element of a vector of four."""
        return [self.splat(self.builder.extract_element(rows, INDEX(i))) for i in range(ROWS)]

    def sums(self, count):
        """Vectors that start at zero."""
        return [cgutils.alloca_once_value(self.builder, ir.Constant(VECTOR, None)) for _ in range(count)]

    def clear(self, sums):
        for total in sums:
            self.builder.store(ir.Constant(VECTOR, None), total)

    def add(self, total, a, b):
        """total += a * b"""
        self.builder.store(self.fma(a, b, self.builder.load(total)), total)

    def _add_pairs(self, left, right, width):
        """Lane groups of `width` in both: adds each group's upper half to its lower; left's results, then right's."""
        lower = [i for i in range(2 * LANES) if i % width < width // 2]
        upper = [i + width // 2 for i in lower]
        pick = [ir.Constant(ir.VectorType(INDEX, LANES), lanes) for lanes in (lower, upper)]
        return self.builder.fadd(*(self.builder.shuffle_vector(left, right, lanes) for lanes in pick))

    def add_lanes(self, sums):
        """The sum of the lanes of each of four vectors, as a vector of four."""
        a, b, c, d = (self.builder.load(total) for total in sums)
        rows = self._add_pairs(self._add_pairs(a, b, 16), self._add_pairs(c, d, 16), 8)  # four lanes a row
        rows = self._add_pairs(rows, rows, 4)
        rows = self._add_pairs(rows, rows, 2)  # one lane a row, four times over
        first = ir.Constant(ir.VectorType(INDEX, ROWS), list(range(ROWS)))
        return self.builder.shuffle_vector(rows, rows, first)

    @contextmanager
    def chunks(self, first_row, num_chunks):
        """A loop over the chunks of a row, as (the chunk's offset in a row, where it lies in each state row)."""
        width = self.builder.mul(num_chunks, PLACE(LANES))
        first = self.builder.mul(first_row, width)
        with cgutils.for_range(self.builder, num_chunks) as loop:
            offset = self.builder.mul(loop.index, PLACE(LANES))
            start = self.builder.add(first, offset)
            yield offset, [self.builder.add(start, self.builder.mul(width, PLACE(i))) for i in range(ROWS)]


def _scan_four_rows(context, builder, signature, arguments):
    code, (first_row, num_chunks, decay, dt, D) = _Code(context, builder, signature, arguments[:5]), arguments[5:]
    state, B, C, x, y = code.bases
    x_rows = code.load(x, first_row, FOUR)
    dtx = code.splat_each(builder.fmul(code.splat(dt, FOUR), x_rows))
    decay, sums = code.splat(decay), code.sums(ROWS)
    code.clear(sums)
    with code.chunks(first_row, num_chunks) as (offset, places):
        b_B, b_C = code.load(B, offset), code.load(C, offset)
        for place, dtx_row, total in zip(places, dtx, sums, strict=True):
            h = code.fma(code.load(state, place), decay, builder.fmul(dtx_row, b_B))
            code.store(h, state, place)
            code.add(total, h, b_C)
    code.store(code.fma(code.splat(D, FOUR), x_rows, code.add_lanes(sums)), y, first_row)
    return context.get_dummy_value()


def _delta_four_rows(context, builder, signature, arguments):
    code, (first_row, num_chunks, decay, beta, kq) = _Code(context, builder, signature, arguments[:5]), arguments[5:]
    state, k, q, v, o = code.bases
    sums_k, sums_q = code.sums(ROWS), code.sums(ROWS)
    code.clear([*sums_k, *sums_q])
    with code.chunks(first_row, num_chunks) as (offset, places):
        b_k, b_q = code.load(k, offset), code.load(q, offset)
        for place, total_k, total_q in zip(places, sums_k, sums_q, strict=True):
            h = code.load(state, place)
            code.add(total_k, h, b_k)
            code.add(total_q, h, b_q)
    decay_rows = code.splat(decay, FOUR)
    missing = code.fma(builder.fneg(decay_rows), code.add_lanes(sums_k), code.load(v, first_row, FOUR))
    delta_rows = builder.fmul(code.splat(beta, FOUR), missing)
    kept = builder.fmul(decay_rows, code.add_lanes(sums_q))
    code.store(code.fma(delta_rows, code.splat(kq, FOUR), kept), o, first_row)
    decay, delta = code.splat(decay), code.splat_each(delta_rows)
    with code.chunks(first_row, num_chunks) as (offset, places):
        b_k = code.load(k, offset)
        for place, delta_row in zip(places, delta, strict=True):
            code.store(code.fma(code.load(state, place), decay, builder.fmul(delta_row, b_k)), state, place)
    return context.get_dummy_value()


def _dot(context, builder, signature, arguments):
    code = _Code(context, builder, signature, arguments[:2])
    sums = code.sums(ROWS)  # of which one is used
    code.clear(sums)
    with code.chunks(PLACE(0), arguments[2]) as (offset, _):
        code.add(sums[0], *(code.load(base, offset) for base in code.bases))
    return builder.extract_element(code.add_lanes(sums), INDEX(0))
