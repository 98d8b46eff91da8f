"""Four rows of a Mamba-2 state through one token, as explicit vector code.

Written as vectors of 16 lanes, so that the order of every sum is on the page and no vectoriser decides it: lane l adds
the products of the elements l, l + 16, .. with fused multiply-adds, then lanes are added in halves (8, 4, 2, 1). LLVM
maps the vectors to whatever the processor has, with the same bits.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES, ROWS = 16, 4
FLOAT = ir.FloatType()


@intrinsic
def as_pointer(typing, address):
    return types.voidptr(types.int64), lambda _c, builder, _s, arguments: builder.inttoptr(
        arguments[0], cgutils.voidptr_t
    )


@intrinsic
def scan_four_rows(typing, state, B, C, x, y, first_row, num_chunks, decay, dt, D):
    """Per row p of the four: h = decay * h + (dt * x) * B, in place; y[p] = sum(h * C) + D * x[p].

    All arrays flat, fp32: state rows of `num_chunks` x 16 elements, B and C one such row, x and y one element a row.
    """
    signature = types.void(state, B, C, x, y, types.int64, types.int64, types.float32, types.float32, types.float32)
    return signature, _scan_four_rows


def _scan_four_rows(context, builder, signature, arguments):
    arrays, (first_row, num_chunks, decay, dt, D) = arguments[:5], arguments[5:]
    state, B, C, x, y = (
        context.make_array(kind)(context, builder, array).data
        for kind, array in zip(signature.args, arrays, strict=False)
    )
    lanes, four = ir.VectorType(FLOAT, LANES), ir.VectorType(FLOAT, ROWS)

    def at(base, offset, vector):
        return builder.bitcast(builder.gep(base, [offset]), vector.as_pointer())

    def load(base, offset, vector):
        return builder.load(at(base, offset, vector), align=4, typ=vector)

    def fma(a, b, c):
        kind = ir.FunctionType(a.type, [a.type] * 3)
        name = f"llvm.fma.v{a.type.count}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])

    def splat(value, vector):
        first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
        return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))

    def add_pairs(left, right, width):
        """Lane groups of `width` in both: adds each group's upper half to its lower; left's results, then right's."""
        lower = [i for i in range(2 * LANES) if i % width < width // 2]
        upper = [i + width // 2 for i in lower]
        pick = [ir.Constant(ir.VectorType(ir.IntType(32), LANES), lanes) for lanes in (lower, upper)]
        return builder.fadd(*(builder.shuffle_vector(left, right, lanes) for lanes in pick))

    x_rows = load(x, first_row, four)
    dtx_rows = builder.fmul(splat(dt, four), x_rows)
    dtx = [splat(builder.extract_element(dtx_rows, ir.IntType(32)(i)), lanes) for i in range(ROWS)]
    decay = splat(decay, lanes)
    sums = [cgutils.alloca_once_value(builder, ir.Constant(lanes, None)) for _ in range(ROWS)]
    for total in sums:
        builder.store(ir.Constant(lanes, None), total)
    width = builder.mul(num_chunks, ir.IntType(64)(LANES))
    first = builder.mul(first_row, width)
    with cgutils.for_range(builder, num_chunks) as loop:
        offset = builder.mul(loop.index, ir.IntType(64)(LANES))
        b_B, b_C = load(B, offset, lanes), load(C, offset, lanes)
        for i, total in enumerate(sums):
            place = builder.add(builder.add(first, offset), builder.mul(width, ir.IntType(64)(i)))
            h = fma(load(state, place, lanes), decay, builder.fmul(dtx[i], b_B))
            builder.store(h, at(state, place, lanes), align=4)
            builder.store(fma(h, b_C, builder.load(total)), total)
    a, b, c, d = (builder.load(total) for total in sums)
    rows = add_pairs(add_pairs(a, b, 16), add_pairs(c, d, 16), 8)  # four lanes a row
    rows = add_pairs(rows, rows, 4)
    rows = add_pairs(rows, rows, 2)  # one lane a row, four times over
    picked = builder.shuffle_vector(rows, rows, ir.Constant(ir.VectorType(ir.IntType(32), ROWS), list(range(ROWS))))
    builder.store(fma(splat(D, four), x_rows, picked), at(y, first_row, four), align=4)
    return context.get_dummy_value()
