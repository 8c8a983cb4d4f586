"""The walk over chunks for sm_90: one persistent program a multiprocessor, its warps split by what they do.

The maths is that of :mod:`ckpt_ops.kernels.chain`. An item is one segment, value head and slice of ``D_v``.

- Four warps load: two chunks ahead and the next start state, past the end of the item at hand.
- Four warps walk: they run only the three products that wait for each other (what the state recalls, the update, the
  next state), with the left operands in registers, and hand each rounded state and update on through shared memory.
- Four warps make the outputs from those, and write them and the final states.

Each group tells the next through a barrier in shared memory that a tile is full, and the one before that it is empty.
Tiles that asynchronous copies fill need no proxy fence before the products read them; those that threads store do.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ckpt_ops.kernels.hopper_common import async_load

LOADERS = gl.constexpr(128)


@gluon.jit
def fresh_zero():
    """0, in a way that the compiler cannot see. Addresses that depend on it are computed where they are used; otherwise
    all are computed before the loop and do not fit into registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep(x):
    """``x``, used in a way that the compiler sees: Triton 3.6 does not carry values on from one turn of a loop to the
    next that enter nothing but the bounds of a loop inside."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def locate(item, first_segment, segments, SLICES: gl.constexpr):
    """Segment, value head and slice of ``D_v`` of an item; segments vary fastest, as they may share a start state."""
    rest = item // segments
    return first_segment + item % segments, rest // SLICES, rest % SLICES


@gluon.jit
def load_group(
    q, k, v, cu_seqlens, states, sources, records, first_segment, segments, first_item, last_item,
    q_stride, k_stride, v_stride,
    key_tiles, query_tiles, value_tiles, inverse_tiles, weight_tiles, vector_tiles, state_tile,
    full, empty, state_full, state_empty,
    HK: gl.constexpr, HV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy start states and chunks to shared memory, as soon as there is room; a state that is there already, once."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DK, DK // 8], [4, 1], [1, 0])
    VALUE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    VECTOR: gl.constexpr = 128 // states.dtype.element_ty.primitive_bitwidth
    ROWS: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 * VECTOR // BV, BV // VECTOR], [4, 1], [1, 0])
    SLICES: gl.constexpr = DV // BV

    chunks = 0
    turn = 0
    there = -2
    segment, head, part = locate(first_item, first_segment, segments, SLICES)
    start = gl.load(cu_seqlens + segment)
    end = gl.load(cu_seqlens + segment + 1)
    slot = gl.load(sources + segment)
    # The launches before may still run; nothing that they write is read above, and the other warps work on what is
    # loaded below.
    gdc_wait()
    for item in range(first_item, last_item):
        place = (start // BT + segment).to(gl.int64) * HV + head
        token = start.to(gl.int64)
        q_at = q + token * q_stride + (head // (HV // HK)) * DK
        k_at = k + token * k_stride + (head // (HV // HK)) * DK
        v_at = v + token * v_stride + head * DV + part * BV
        length = keep(end - start)
        wanted = slot
        if (item % segments == 0) | (wanted != there):
            mbarrier.wait(state_empty, (turn & 1) ^ 1)
            dim_k = (fresh_zero() + gl.arange(0, DK, gl.SliceLayout(1, ROWS)))[:, None]
            state_place = dim_k * DV + gl.arange(0, BV, gl.SliceLayout(0, ROWS))[None, :]
            s_at = states + (wanted.to(gl.int64) * HV + head) * (DK * DV) + part * BV
            async_load(state_tile, s_at + state_place, mask=dim_k < gl.where(wanted >= 0, DK, 0))
            async_copy.mbarrier_arrive(state_full, increment_count=False)
            turn += 1
        there = wanted
        segment, head, part = locate(gl.minimum(item + 1, last_item - 1), first_segment, segments, SLICES)
        start = gl.load(cu_seqlens + segment)
        end = gl.load(cu_seqlens + segment + 1)
        slot = gl.load(sources + segment)
        for base in range(0, length, BT):
            stage = chunks % STAGES
            mbarrier.wait(empty.index(stage), ((chunks // STAGES) & 1) ^ 1)
            left = length - base
            zero = fresh_zero()
            row = (zero + gl.arange(0, BT, gl.SliceLayout(1, WIDE)))[:, None]
            column = gl.arange(0, DK, gl.SliceLayout(0, WIDE))[None, :]
            value_row = (zero + gl.arange(0, BT, gl.SliceLayout(1, VALUE)))[:, None]
            value_column = gl.arange(0, BV, gl.SliceLayout(0, VALUE))[None, :]
            square_row = (zero + gl.arange(0, BT, gl.SliceLayout(1, SQUARE)))[:, None]
            square = square_row * BT + gl.arange(0, BT, gl.SliceLayout(0, SQUARE))[None, :]
            line = zero + gl.arange(0, 4 * BT, LINE)
            record = records + place * (2 * BT * BT + 8 * BT)
            async_load(key_tiles.index(stage), k_at + row * k_stride + column, mask=row < left)
            async_load(value_tiles.index(stage), v_at + value_row * v_stride + value_column, mask=value_row < left)
            async_load(inverse_tiles.index(stage), record + square)
            vectors = (record + 2 * BT * BT).to(gl.pointer_type(gl.float32), bitcast=True)
            async_load(vector_tiles.index(stage), vectors + line)
            async_load(query_tiles.index(stage), q_at + row * q_stride + column, mask=row < left)
            async_load(weight_tiles.index(stage), record + BT * BT + square)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            chunks += 1
            place += HV
            q_at += BT * q_stride
            k_at += BT * k_stride
            v_at += BT * v_stride


@gluon.jit
def walk_group(
    cu_seqlens, sources, first_segment, segments, first_item, last_item,
    key_tiles, value_tiles, inverse_tiles, vector_tiles, state_tile, rounded_tile, update_tile, final_tile,
    full, empty, state_full, state_empty, inner_full, inner_empty, final_full, final_empty,
    HV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Carry each item's state through its chunks."""
    TYPE: gl.constexpr = key_tiles.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    STATE_LEFT: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    SCORE_LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORE, 2)
    TIME: gl.constexpr = gl.SliceLayout(0, SCORE)
    SLICES: gl.constexpr = DV // BV
    blank = gl.zeros([BV, BT], gl.float32, SCORE)
    nothing = gl.zeros([BV, DK], gl.float32, STATE)

    chunks = 0
    turn = 0
    there = -2
    segment, _head, _part = locate(first_item, first_segment, segments, SLICES)
    start = gl.load(cu_seqlens + segment)
    end = gl.load(cu_seqlens + segment + 1)
    slot = gl.load(sources + segment)
    for item in range(first_item, last_item):
        length = keep(end - start)
        wanted = slot
        segment, _head, _part = locate(gl.minimum(item + 1, last_item - 1), first_segment, segments, SLICES)
        start = gl.load(cu_seqlens + segment)
        end = gl.load(cu_seqlens + segment + 1)
        slot = gl.load(sources + segment)
        if (item % segments == 0) | (wanted != there):
            mbarrier.wait(state_full, turn & 1)
            turn += 1
        there = wanted
        state = state_tile.permute((1, 0)).load(STATE).to(gl.float32)
        if (item == last_item - 1) | ((item + 1) % segments == 0) | (slot != there):
            mbarrier.arrive(state_empty)
        for _ in range(0, length, BT):
            stage = chunks % STAGES
            mbarrier.wait(full.index(stage), (chunks // STAGES) & 1)
            keys = key_tiles.index(stage)
            vector = vector_tiles.index(stage)
            rounded = state.to(TYPE)
            left = gl.convert_layout(rounded, SCORE_LEFT)
            recalled = warpgroup_mma(left, keys.permute((1, 0)), blank, use_acc=False, is_async=True)
            values = value_tiles.index(stage).permute((1, 0)).load(SCORE)
            key_reach = vector.slice(0, BT).load(TIME)[None, :]
            recalled = warpgroup_mma_wait(0, [recalled])
            error = gl.convert_layout((values.to(gl.float32) - recalled * key_reach).to(TYPE), SCORE_LEFT)
            inverse = inverse_tiles.index(stage).permute((1, 0))
            update = warpgroup_mma(error, inverse, blank, use_acc=False, is_async=True)
            key_left = vector.slice(2 * BT, BT).load(TIME)[None, :]
            fade = vector.slice(3 * BT, 1).load(gl.SliceLayout(0, STATE))[None, :]
            update = warpgroup_mma_wait(0, [update])
            carried = gl.convert_layout((update * key_left).to(TYPE), STATE_LEFT)
            mbarrier.wait(inner_empty, (chunks & 1) ^ 1)
            added = warpgroup_mma(carried, keys, nothing, use_acc=False, is_async=True)
            rounded_tile.store(rounded)
            update_tile.store(update.to(TYPE))
            fence_async_shared()
            mbarrier.arrive(inner_full)
            added = warpgroup_mma_wait(0, [added])
            mbarrier.arrive(empty.index(stage))
            state = state * fade + added
            chunks += 1
        mbarrier.wait(final_empty, ((item - first_item) & 1) ^ 1)
        final_tile.permute((1, 0)).store(state.to(final_tile.dtype))
        mbarrier.arrive(final_full)


@gluon.jit
def output_group(
    out, cu_seqlens, states, destinations, first_segment, segments, first_item, last_item,
    query_tiles, weight_tiles, vector_tiles, rounded_tile, update_tile, final_tile,
    full, empty, inner_full, inner_empty, final_full, final_empty,
    HV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Outputs from the states and updates that the walk hands over, off its path; and the final states."""
    TYPE: gl.constexpr = query_tiles.dtype
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
    VECTOR: gl.constexpr = 128 // states.dtype.element_ty.primitive_bitwidth
    KEPT: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 * VECTOR // BV, BV // VECTOR], [4, 1], [1, 0])
    SLICES: gl.constexpr = DV // BV
    blank = gl.zeros([BT, BV], gl.float32, RESULT)
    chunks = 0
    for item in range(first_item, last_item):
        segment, head, part = locate(item, first_segment, segments, SLICES)
        start = gl.load(cu_seqlens + segment)
        length = gl.load(cu_seqlens + segment + 1) - start
        destination = gl.load(destinations + segment)
        target = out + start.to(gl.int64) * (HV * DV) + head * DV + part * BV
        for base in range(0, length, BT):
            stage = chunks % STAGES
            mbarrier.wait(full.index(stage), (chunks // STAGES) & 1)
            mbarrier.wait(inner_full, chunks & 1)
            result = warpgroup_mma(
                query_tiles.index(stage), rounded_tile.permute((1, 0)), blank, use_acc=False, is_async=True
            )
            reach = vector_tiles.index(stage).slice(BT, BT).load(gl.SliceLayout(1, RESULT))[:, None]
            result = warpgroup_mma_wait(0, [result]) * reach
            result = warpgroup_mma(weight_tiles.index(stage), update_tile.permute((1, 0)), result, is_async=True)
            result = warpgroup_mma_wait(0, [result])
            mbarrier.arrive(inner_empty)
            mbarrier.arrive(empty.index(stage))
            row = (fresh_zero() + gl.arange(0, BT, gl.SliceLayout(1, ROWS)))[:, None]
            column = gl.arange(0, BV, gl.SliceLayout(0, ROWS))[None, :]
            tile = gl.convert_layout(result.to(TYPE), ROWS)
            gl.store(target + row * (HV * DV) + column, tile, mask=row < length - base)
            target += BT * (HV * DV)
            chunks += 1
        mbarrier.wait(final_full, (item - first_item) & 1)
        final = final_tile.load(KEPT)
        mbarrier.arrive(final_empty)
        if destination >= 0:
            dim_k = (fresh_zero() + gl.arange(0, DK, gl.SliceLayout(1, KEPT)))[:, None]
            dim_v = gl.arange(0, BV, gl.SliceLayout(0, KEPT))[None, :]
            kept = states + (destination.to(gl.int64) * HV + head) * (DK * DV) + part * BV
            gl.store(kept + dim_k * DV + dim_v, final)


@gluon.jit(do_not_specialize=["first_segment", "segments", "share"])
def hopper_chain_kernel(
    q,
    k,
    v,
    out,
    cu_seqlens,
    states,
    sources,
    destinations,
    records,
    first_segment,
    segments,
    share,
    q_stride,
    k_stride,
    v_stride,
    HK: gl.constexpr,
    HV: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    BV: gl.constexpr,
    BT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid: ``cdiv(items, share)`` with items the segments of the phase times ``H_v`` times ``D_v / BV``, and ``share``
    of them for each program; 4 warps.

    Arguments as ``chain_kernel``, and D_k 64 or 128, BV and BT 64, half precision, strides in elements multiples
    of 16, pointers of 16 bytes. ``sources`` of children are their parents' destinations.
    records: for each chunk and value head T, A and the vectors, as ``hopper_intra_kernel`` wrote them.
    """
    TYPE: gl.constexpr = k.dtype.element_ty
    KEPT: gl.constexpr = states.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    key_tiles = gl.allocate_shared_memory(TYPE, [STAGES, BT, DK], TILE)
    query_tiles = gl.allocate_shared_memory(TYPE, [STAGES, BT, DK], TILE)
    value_tiles = gl.allocate_shared_memory(TYPE, [STAGES, BT, BV], TILE)
    inverse_tiles = gl.allocate_shared_memory(TYPE, [STAGES, BT, BT], TILE)
    weight_tiles = gl.allocate_shared_memory(TYPE, [STAGES, BT, BT], TILE)
    vector_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BT], PLAIN)
    rounded_tile = gl.allocate_shared_memory(TYPE, [BV, DK], TILE)
    update_tile = gl.allocate_shared_memory(TYPE, [BV, BT], TILE)
    final_tile = gl.allocate_shared_memory(KEPT, [DK, BV], ROWS)
    state_tile = gl.allocate_shared_memory(KEPT, [DK, BV], ROWS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    inner_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    inner_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    final_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    final_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    state_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    state_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=LOADERS)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(final_full, count=1)
    mbarrier.init(final_empty, count=1)
    mbarrier.init(inner_full, count=1)
    mbarrier.init(inner_empty, count=1)
    mbarrier.init(state_full, count=LOADERS)
    mbarrier.init(state_empty, count=1)
    first_item = gl.program_id(0) * share
    last_item = gl.minimum(first_item + share, segments * (HV * (DV // BV)))
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                walk_group,
                (
                    cu_seqlens, sources, first_segment, segments, first_item, last_item, key_tiles, value_tiles,
                    inverse_tiles, vector_tiles, state_tile, rounded_tile, update_tile, final_tile, full, empty,
                    state_full, state_empty, inner_full, inner_empty, final_full, final_empty, HV, DK, DV, BV, BT,
                    STAGES,
                ),
            ),
            (
                load_group,
                (
                    q, k, v, cu_seqlens, states, sources, records, first_segment, segments, first_item, last_item,
                    q_stride, k_stride, v_stride, key_tiles, query_tiles, value_tiles, inverse_tiles, weight_tiles,
                    vector_tiles, state_tile, full, empty, state_full, state_empty, HK, HV, DK, DV, BV, BT, STAGES,
                ),
            ),
            (
                output_group,
                (
                    out, cu_seqlens, states, destinations, first_segment, segments, first_item, last_item, query_tiles,
                    weight_tiles, vector_tiles, rounded_tile, update_tile, final_tile, full, empty, inner_full,
                    inner_empty, final_full, final_empty, HV, DK, DV, BV, BT, STAGES,
                ),
            ),
        ],
        [4, 4],
        [112, 128],
    )  # fmt: skip
