"""Vector code for compiled CPU kernels: what numba's loops do not turn into good machine code by themselves.

Each function is an intrinsic for use inside `numba.njit`. It says exactly which operations are done in which order;
the compiler may not change a sum. Arrays are two-dimensional, contiguous and fp32 unless said otherwise.
"""

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
PRODUCT_ROWS, PRODUCT_VECTORS = 4, 2  # a product keeps this many rows of this many vectors in registers
COLUMNS = 32  # numbers of columns are multiples of this, whatever LANES is

FLOAT, INDEX = ir.FloatType(), ir.IntType(32)


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c, rounded once, whatever surrounds it."""
    return a(a, b, c), lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def float_as_bits(typing_context, a):
    """The bits of a float32, as int32."""
    return types.int32(a), lambda context, builder, signature, args: builder.bitcast(args[0], INDEX)


@intrinsic
def bits_as_float(typing_context, a):
    """The float32 that an int32 holds the bits of."""
    return types.float32(a), lambda context, builder, signature, args: builder.bitcast(args[0], FLOAT)


@intrinsic
def add_product(typing_context, a, b, c, num_rows, num_columns, depth):
    """c[i, j] += a[i, k] * b[k, j], a fused multiply-add for each k < depth in turn.

    num_rows is a multiple of PRODUCT_ROWS, num_columns of COLUMNS; the arrays have room for that.
    """

    def code(context, builder, signature, args):
        a, b, c = _matrices(context, builder, signature, args[:3])
        num_rows, num_columns, depth = args[3:]
        vector, zero = ir.VectorType(FLOAT, LANES), ir.Constant(num_rows.type, 0)
        steps = [ir.Constant(zero.type, n) for n in (PRODUCT_ROWS, LANES * PRODUCT_VECTORS)]
        cells = [(row, v) for row in range(PRODUCT_ROWS) for v in range(PRODUCT_VECTORS)]
        with (
            cgutils.for_range_slice(builder, zero, num_rows, steps[0]) as (i, _),
            cgutils.for_range_slice(builder, zero, num_columns, steps[1]) as (j, _),
        ):
            sums = {cell: cgutils.alloca_once(builder, vector) for cell in cells}
            for row, v in cells:
                builder.store(c.load(vector, i, j, row, v * LANES), sums[row, v])
            with cgutils.for_range(builder, depth) as loop:
                right = [b.load(vector, loop.index, j, 0, v * LANES) for v in range(PRODUCT_VECTORS)]
                left = [broadcast(builder, a.load(FLOAT, i, loop.index, row), vector) for row in range(PRODUCT_ROWS)]
                for row, v in cells:
                    value = multiply_add(builder, left[row], right[v], builder.load(sums[row, v]))
                    builder.store(value, sums[row, v])
            for row, v in cells:
                c.store(builder.load(sums[row, v]), i, j, row, v * LANES)
        return context.get_dummy_value()

    return types.void(a, b, c, types.intp, types.intp, types.intp), code


@intrinsic
def transpose(typing_context, a, b, num_rows, num_columns):
    """b[j, i] = a[i, j]; both numbers are multiples of COLUMNS."""

    def code(context, builder, signature, args):
        a, b = _matrices(context, builder, signature, args[:2])
        num_rows, num_columns = args[2:]
        vector, zero, step = ir.VectorType(FLOAT, LANES), *(ir.Constant(num_rows.type, n) for n in (0, LANES))
        halves = []  # lanes 0 and LANES, 1 and LANES + 1, ... of two vectors, the first and the second half of them
        for start in (0, LANES // 2):
            lanes = [lane for i in range(start, start + LANES // 2) for lane in (i, LANES + i)]
            halves.append(ir.Constant(ir.VectorType(INDEX, LANES), lanes))
        with (
            cgutils.for_range_slice(builder, zero, num_rows, step) as (i, _),
            cgutils.for_range_slice(builder, zero, num_columns, step) as (j, _),
        ):
            block = [a.load(vector, i, j, row, 0) for row in range(LANES)]
            for _ in range(LANES.bit_length() - 1):  # each pass moves one bit of the row number to the lane number
                pairs = list(zip(block[: LANES // 2], block[LANES // 2 :], strict=True))
                block = [builder.shuffle_vector(*pair, half) for pair in pairs for half in halves]
            for row in range(LANES):
                b.store(block[row], j, i, row, 0)
        return context.get_dummy_value()

    return types.void(a, b, types.intp, types.intp), code


@intrinsic
def widen_row(typing_context, source, start, shift, target, row, count):
    """target[row, j] = source[start + j] << shift for j < count: 16 or 32 bits a number, left as 32 bits.

    source: flat, unsigned. The target is seen as bits; shift 16 makes fp32 of bf16.
    """

    def code(context, builder, signature, args):
        _, start, shift, _, row, count = args
        base = context.make_array(signature.args[0])(context, builder, args[0]).data
        (target,) = _matrices(context, builder, (signature.args[3],), args[3:4])
        number, zero = base.type.pointee, ir.Constant(start.type, 0)

        def copy(first, stop, lanes):
            narrow, wide = (ir.VectorType(kind, lanes) for kind in (number, INDEX))
            with cgutils.for_range_slice(builder, first, stop, ir.Constant(start.type, lanes)) as (j, _):
                place = builder.gep(base, [builder.add(start, j)])
                bits = builder.load(builder.bitcast(place, narrow.as_pointer()), align=number.width // 8)
                bits = builder.zext(bits, wide) if number.width < 32 else bits
                bits = builder.shl(bits, broadcast(builder, shift, wide))
                target.store(builder.bitcast(bits, ir.VectorType(FLOAT, lanes)), row, j)

        whole = builder.and_(count, ir.Constant(count.type, -LANES))
        copy(zero, whole, LANES)
        copy(whole, count, 1)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.uint32, target, types.intp, types.intp), code


def _fold(combine):
    """An intrinsic that reduces the first 64 numbers of a row: number i with i + 32, then i with i + 16, and so on."""

    @intrinsic
    def fold(typing_context, a, row):
        def code(context, builder, signature, args):
            (a,) = _matrices(context, builder, signature, args[:1])
            values = a.load(ir.VectorType(FLOAT, 64), args[1], ir.Constant(args[1].type, 0))
            for half in (32, 16, 8, 4, 2, 1):
                low, high = (
                    builder.shuffle_vector(
                        values, values, ir.Constant(ir.VectorType(INDEX, half), list(range(start, start + half)))
                    )
                    for start in (0, half)
                )
                values = combine(builder, low, high)
            return builder.extract_element(values, ir.Constant(INDEX, 0))

        return types.float32(a, types.intp), code

    return fold


sum_64 = _fold(lambda builder, a, b: builder.fadd(a, b))
max_64 = _fold(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


class _Matrix:
    """Code that reaches into a contiguous two-dimensional array of fp32."""

    def __init__(self, builder, array):
        self.builder, self.base = builder, array.data
        self.width = builder.extract_value(array.shape, 1)

    def _place(self, kind, row, column, more_rows, more_columns):
        builder = self.builder
        row = builder.add(row, ir.Constant(row.type, more_rows))
        column = builder.add(column, ir.Constant(column.type, more_columns))
        place = builder.gep(self.base, [builder.add(builder.mul(row, self.width), column)])
        return builder.bitcast(place, kind.as_pointer())

    def load(self, kind, row, column, more_rows: int = 0, more_columns: int = 0):
        return self.builder.load(self._place(kind, row, column, more_rows, more_columns), align=4)

    def store(self, value, row, column, more_rows: int = 0, more_columns: int = 0):
        self.builder.store(value, self._place(value.type, row, column, more_rows, more_columns), align=4)


def _matrices(context, builder, signature, values) -> list[_Matrix]:
    kinds = getattr(signature, "args", signature)
    pairs = zip(kinds, values, strict=False)
    return [_Matrix(builder, context.make_array(kind)(context, builder, value)) for kind, value in pairs]


def broadcast(builder, value, vector):
    """A vector of one value."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(INDEX, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INDEX, vector.count), [0] * vector.count))


def multiply_add(builder, a, b, c):
    """a * b + c of fp32 vectors, rounded once."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32"), [a, b, c])
