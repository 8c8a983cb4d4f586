"""The public functions of the delta rule: host checks of shapes, dtypes and devices, then the registered op.

No check reads a tensor's values, so none syncs with the device; :func:`check_gates` is the explicit exception.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckpt_ops import schema  # noqa: F401  (registers torch.ops.ckpt_ops)
from ckpt_ops.checks import check_delta_rule, check_slots, check_strided, check_table
from ckpt_ops.errors import ArgumentError
from ckpt_ops.readings import read_factor
from ckpt_ops.segments import SegmentTable


def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    table: SegmentTable,
    *,
    scale: float | None = None,
) -> Tensor:
    """Gated delta rule over packed, independent sequences; states are read from and written to their slots.

    ``S <- exp(g) S; S <- S + beta k (v - k^T S)^T; o = scale q^T S`` (arXiv 2412.06464, eq. 10), computed in chunks of
    64 tokens. The chunk grid starts anew at each segment.

    Args:
        q, k: ``[T, H_k, D_k]``, fp32, bf16 or fp16 (fp64 on a CPU); L2-normalised inside. ``D_k`` at most 256.
        v: ``[T, H_v, D_v]``, ``q``'s dtype; ``H_v`` a multiple of ``H_k``, ``D_v`` at most 256.
        g: ``[T, H_v]``, any float dtype, natural log of the decay, at most 0.
        beta: ``[T, H_v]``, any float dtype, in [0, 1].
        states: pool ``[num_slots, H_v, D_k, D_v]``, contiguous, mutated.
        table: the batch, with no parents.
        scale: factor of the output; ``D_k ** -0.5`` by default.

    Returns:
        ``[T, H_v, D_v]`` in ``v``'s dtype.

    Raises:
        ArgumentError: a shape, dtype, device or scale is wrong, or the table has parents.
    """
    check_delta_rule(q, k, v, g, beta, states)
    check_table(table, q, "q", states)
    if table.num_phases > 1:
        raise ArgumentError(
            f"table must have no parents for gdn_prefill, but it has {table.num_phases} phases; "
            "use two_phase_gdn_prefill"
        )
    out: Tensor = torch.ops.ckpt_ops.gdn_prefill(
        q, k, v, g, beta, table.cu_seqlens, states, table.sources, table.destinations, _read_scale(scale)
    )
    return out


def two_phase_gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    table: SegmentTable,
    *,
    scale: float | None = None,
) -> Tensor:
    """:func:`gdn_prefill` over a forest: a segment may continue from the final state of another one of the batch.

    The child reads its parent's destination slot after the parent's phase, so its result is the same, to the bit, as
    if the parent had run in an earlier call. All that does not depend on states runs for all phases at once.
    """
    check_delta_rule(q, k, v, g, beta, states)
    check_table(table, q, "q", states)
    out: Tensor = torch.ops.ckpt_ops.two_phase_gdn_prefill(
        q,
        k,
        v,
        g,
        beta,
        table.cu_seqlens,
        states,
        table.sources,
        table.destinations,
        table.parents,
        table.phase_offsets,
        _read_scale(scale),
    )
    return out


def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """One token of the gated delta rule for each of B running sequences, states in place.

    Args:
        q, k, v, g, beta, states, scale: as in :func:`gdn_prefill`, with B rows.
        slots: int32 ``[B]``; row b reads and writes slot ``slots[b]``. -1 writes nothing and outputs zeros. Slots
            other than -1 must differ and lie in the pool: on a GPU their values are not checked, as that would sync.

    Returns:
        ``[B, H_v, D_v]`` in ``v``'s dtype.
    """
    check_delta_rule(q, k, v, g, beta, states)
    check_slots(slots, q, "q")
    out: Tensor = torch.ops.ckpt_ops.gdn_decode(q, k, v, g, beta, states, slots, _read_scale(scale))
    return out


def _read_scale(scale: float | None) -> float | None:
    if scale is None or torch.compiler.is_compiling():  # there it may be a symbol, which has no value yet
        return scale
    return read_factor("scale", scale)


def check_gates(g: Tensor, beta: Tensor) -> None:
    """Raise on gates that no model produces; syncs with the device, so it is not part of the ops.

    Args:
        g: log decays of any shape: not NaN, at most 0.
        beta: write strengths of any shape: not NaN.

    Raises:
        ArgumentError: a NaN, or a ``g`` above 0, which would make the state grow without bound.
    """
    for name, gate in (("g", g), ("beta", beta)):
        check_strided(name, gate)
        bad = int(gate.isnan().sum())
        if bad:
            raise ArgumentError(f"{name} must be finite, but {bad} of {gate.numel()} values are NaN")
    if g.numel() and float(g.max()) > 0:
        raise ArgumentError(f"g must be at most 0 (the log of a decay), but its largest value is {float(g.max())}")
