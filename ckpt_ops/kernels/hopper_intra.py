"""What no state enters, for sm_90: one program for each chunk of each value head, with explicit layouts.

The maths is that of :mod:`ckpt_ops.kernels.intra`, with gates in base 2. The squared norms of keys and queries are the
diagonals of their Gram matrices, so no row is read a second time. In the forward substitution each thread owns a column
of a diagonal block and holds it in registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ckpt_ops.kernels.hopper_common import async_load

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def power_of_two(x):
    """``2 ** x`` in one instruction; results below the normal numbers become 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def find_segment(cu_seqlens, num_segments, chunk, BT: gl.constexpr):
    """Segment that owns ``chunk`` (see ``common.find_segment``), its start and its end; each warp finds them alone."""
    lanes = gl.arange(0, 128, gl.BlockedLayout([4], [32], [4], [0]))
    before = 0
    start = 0
    end = 2147483647
    for base in range(0, num_segments + 1, 128):
        segment = base + lanes
        offset = gl.load(cu_seqlens + segment, mask=segment <= num_segments, other=2147483647)
        begun = (segment < num_segments) & (offset // BT + segment <= chunk)
        before += gl.sum(begun.to(gl.int32), axis=0)
        start = gl.maximum(start, gl.max(gl.where(begun, offset, 0), axis=0))
        end = gl.minimum(end, gl.min(gl.where(begun, 2147483647, offset), axis=0))
    return before - 1, start, end


@gluon.jit
def diagonal(matrix, BT: gl.constexpr, LAYOUT: gl.constexpr):
    """Diagonal ``[BT]`` of ``matrix``."""
    row = gl.arange(0, BT, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, BT, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.sum(gl.where(row == column, matrix, 0.0), axis=1)


@gluon.jit
def in_blocks(BT: gl.constexpr, LAYOUT: gl.constexpr):
    """Whether row and column lie in the same 16 x 16 diagonal block: bool ``[BT, BT]``."""
    row = gl.arange(0, BT, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, BT, gl.SliceLayout(0, LAYOUT))[None, :]
    return (row // 16) == (column // 16)


@gluon.jit
def keep_blocks(lower, blocks, outside, BT: gl.constexpr, LAYOUT: gl.constexpr):
    """Store the diagonal blocks of ``lower`` in ``blocks`` ``[16, BT / 16, 16]``, row first, and the rest, with zeros
    in the blocks, in ``outside`` ``[BT, BT]``."""
    same = in_blocks(BT, LAYOUT)
    outside.store(gl.where(same, 0.0, lower).to(outside.dtype))
    inner = gl.sum(gl.reshape(gl.where(same, lower, 0.0), [BT // 16, 16, BT // 16, 16]), axis=2)
    blocks.store(gl.permute(inner, (1, 0, 2)))


@gluon.jit
def substitute(lower, inverse, BLOCKS: gl.constexpr):
    """Inverses of ``I + lower`` by forward substitution: fp32 ``lower[row, block, column]`` to
    ``inverse[0, block, row, column]``, each thread a column."""
    OWN: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 2, 16], [1, 4, 1], [2, 1, 0])
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, OWN)))[None, :, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, OWN)))[None, None, :] + 0 * block
    rows = ()
    for i in gl.static_range(16):
        value = gl.where(column == i, 1.0, 0.0)
        for j in gl.static_range(i):
            value = value - lower.slice(i, 1).slice(j, 1, dim=2).load(OWN) * rows[j]
        rows = rows + (value,)
    for half in gl.static_range(4):
        paired = ()
        for i in gl.static_range(8 >> half):
            paired = paired + (gl.join(rows[i], rows[i + (8 >> half)]),)
        rows = paired
    inverse.store(gl.permute(gl.reshape(rows[0], [1, BLOCKS, 16, 16]), (0, 1, 3, 2)))


@gluon.jit
def spread(stacked, BT: gl.constexpr, LAYOUT: gl.constexpr):
    """fp32 ``[BT, BT]`` with ``stacked`` ``[BT, 16]`` as its diagonal blocks."""
    SMALL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    half = stacked.load(SMALL)
    half = gl.reshape(gl.permute(gl.join(half, half), (0, 2, 1)), [BT, 32])
    wide = gl.reshape(gl.permute(gl.join(half, half), (0, 2, 1)), [BT, BT])
    return gl.where(in_blocks(BT, LAYOUT), gl.convert_layout(wide, LAYOUT), 0.0)


@gluon.jit
def store_square(target, square, BT: gl.constexpr):
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, BT, gl.SliceLayout(1, NARROW))[:, None]
    column = gl.arange(0, BT, gl.SliceLayout(0, NARROW))[None, :]
    gl.store(target + row * BT + column, gl.convert_layout(square.to(target.dtype.element_ty), NARROW))


@gluon.jit
def load_gates(
    g,
    beta,
    token,
    head,
    remaining,
    g_stride,
    beta_stride,
    totals,
    strengths,
    BT: gl.constexpr,
    MIN_LOG_GATE: gl.constexpr,
):
    """Store the inclusive sums of log gates, in base 2, and the write strengths of a chunk."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PAIRS: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    lane = gl.arange(0, BT, EACH)
    valid = lane < remaining
    gate = gl.load(g + (token + lane) * g_stride + head, mask=valid, other=0.0).to(gl.float32)
    strength = gl.load(beta + (token + lane) * beta_stride + head, mask=valid, other=0.0).to(gl.float32)
    totals.store(gl.maximum(gate, MIN_LOG_GATE) * LOG2_E)
    strengths.store(strength)
    # Every warp sums all, each thread two neighbours.
    totals.store(gl.associative_scan(totals.load(PAIRS), 0, _add))


@gluon.jit
def invert(blocks, inverses, left, right, BT: gl.constexpr, SCORE: gl.constexpr):
    """``(I - N)(I + N^2) D^-1`` ``[BT, BT]``: D the ``blocks`` on the diagonal, N = D^-1 times the rest, ``right``."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORE, 2)
    substitute(blocks, inverses, BT // 16)
    start = spread(inverses.reshape([BT, 16]), BT, SCORE)
    left.store(start.to(gl.float16))
    fence_async_shared()
    blank = gl.zeros([BT, BT], gl.float32, SCORE)
    nilpotent = warpgroup_mma(left, right, blank, use_acc=False).to(gl.float16)
    right.store(nilpotent)
    factor = gl.convert_layout(nilpotent, LEFT)
    fence_async_shared()
    square = warpgroup_mma(factor, right, blank, use_acc=False)
    partial = warpgroup_mma(gl.convert_layout(square.to(gl.float16), LEFT), left, start)
    left.store(partial.to(gl.float16))
    fence_async_shared()
    return warpgroup_mma(gl.convert_layout(-nilpotent, LEFT), left, partial)


@gluon.jit(do_not_specialize=["num_segments", "first_segment", "last_segment", "g_stride", "beta_stride"])
def hopper_intra_kernel(
    q,
    k,
    g,
    beta,
    cu_seqlens,
    records,
    num_segments,
    first_segment,
    last_segment,
    q_stride,
    k_stride,
    g_stride,
    beta_stride,
    scale,
    HK: gl.constexpr,
    HV: gl.constexpr,
    DK: gl.constexpr,
    BT: gl.constexpr,
    MIN_LOG_GATE: gl.constexpr,
    NORM_EPS: gl.constexpr,
    LATE: gl.constexpr,
):
    """Grid ``(H_v, T // BT + N)``, 4 warps.

    Arguments as ``intra_kernel``, and D_k 64 or 128, BT 64, half precision, q and k aligned to 16 bytes with strides
    that are multiples of 16 elements.

    Args:
        records: ``[chunks, H_v, 2 BT^2 + 8 BT]`` in q's dtype, written: T and A, row-major, and in fp32 the vectors
            ``rk exp(G)``, ``scale rq exp(G)``, ``rk exp(G_C - G)`` and ``exp(G_C)`` in every place.
        first_segment, last_segment: only chunks of segments from the first on and before the last are computed.
        LATE: the launch before may still run, and the one after relies on both: end after it.
    """
    TYPE: gl.constexpr = k.dtype.element_ty
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORE)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DK, DK // 8], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gdc_launch_dependents()

    chunk = gl.program_id(1)
    head = gl.program_id(0)
    segment, start, end = find_segment(cu_seqlens, num_segments, chunk, BT)
    first = start + (chunk - (start // BT + segment)) * BT
    if (first < end) & (segment >= first_segment) & (segment < last_segment):
        remaining = end - first
        token = first.to(gl.int64)
        key_head = head // (HV // HK)
        keys = gl.allocate_shared_memory(TYPE, [BT, DK], TILE)
        queries = gl.allocate_shared_memory(TYPE, [BT, DK], TILE)
        row = gl.arange(0, BT, gl.SliceLayout(1, WIDE))[:, None]
        column = gl.arange(0, DK, gl.SliceLayout(0, WIDE))[None, :]
        inside = row < remaining
        async_load(keys, k + token * k_stride + key_head * DK + row * k_stride + column, mask=inside)
        async_load(queries, q + token * q_stride + key_head * DK + row * q_stride + column, mask=inside)
        async_copy.commit_group()
        totals = gl.allocate_shared_memory(gl.float32, [BT], PLAIN)
        strengths = gl.allocate_shared_memory(gl.float32, [BT], PLAIN)
        load_gates(g, beta, token, head, remaining, g_stride, beta_stride, totals, strengths, BT, MIN_LOG_GATE)

        blank = gl.zeros([BT, BT], gl.float32, SCORE)
        async_copy.wait_group(0)
        gram = warpgroup_mma(keys, keys.permute((1, 0)), blank, use_acc=False, is_async=True)
        own = warpgroup_mma(queries, queries.permute((1, 0)), blank, use_acc=False, is_async=True)
        cross = warpgroup_mma(queries, keys.permute((1, 0)), blank, use_acc=False, is_async=True)
        gram, own, cross = warpgroup_mma_wait(0, [gram, own, cross])
        key_norm = gl.rsqrt(diagonal(gram, BT, SCORE) + NORM_EPS)
        query_norm = gl.rsqrt(diagonal(own, BT, SCORE) + NORM_EPS) * scale
        norms = gl.allocate_shared_memory(gl.float32, [BT], PLAIN)
        norms.store(key_norm)

        i = gl.arange(0, BT, ROW)[:, None]
        j = gl.arange(0, BT, COLUMN)[None, :]
        total = totals.load(ROW)
        decay = (
            power_of_two(gl.minimum(total[:, None] - totals.load(COLUMN)[None, :], 0.0)) * norms.load(COLUMN)[None, :]
        )
        lower = gl.where(i > j, gram * decay * (strengths.load(ROW) * key_norm)[:, None], 0.0)
        blocks = gl.allocate_shared_memory(gl.float32, [16, BT // 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
        right = gl.allocate_shared_memory(gl.float16, [BT, BT], TILE)
        keep_blocks(lower, blocks, right, BT, SCORE)
        # Written early: registers are what limits how many programs share a multiprocessor.
        record = records + (chunk.to(gl.int64) * HV + head) * (2 * BT * BT + 8 * BT)
        store_square(record + BT * BT, gl.where(i >= j, cross * decay * query_norm[:, None], 0.0), BT)
        final = gl.sum(gl.where(gl.arange(0, BT, ROW) == BT - 1, total, 0.0), axis=0)
        vector = (record + 2 * BT * BT).to(gl.pointer_type(gl.float32), bitcast=True) + gl.arange(0, BT, ROW)
        reach = power_of_two(total)
        gl.store(vector, key_norm * reach)
        gl.store(vector + BT, query_norm * reach)
        gl.store(vector + 2 * BT, key_norm * power_of_two(gl.minimum(final - total, 0.0)))
        gl.store(vector + 3 * BT, power_of_two(total * 0.0 + final))

        square_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
        inverses = gl.allocate_shared_memory(gl.float32, [1, BT // 16, 16, 16], square_layout)
        left = gl.allocate_shared_memory(gl.float16, [BT, BT], TILE)
        inverse = invert(blocks, inverses, left, right, BT, SCORE)
        store_square(record, inverse * strengths.load(COLUMN)[None, :], BT)
    if LATE:
        if (chunk == gl.num_programs(1) - 1) & (head == HV - 1):
            gdc_wait()
