"""The gates of the delta rule, computed by the programs of the convolution that own a token's first channels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """``log(1 + exp(x))`` in fp32 with a small relative error for every ``x``: ``max(x, 0) + log1p(exp(-|x|))``.

    ``log1p(y) = 2 artanh(s)`` with ``s = y / (2 + y)``, by its series: y is at most 1, so s at most 1/3, and the first
    term left out is below 2^-28 of the sum. The hardware's logarithm is only absolutely accurate near 1.
    """
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    series = 1.0 / 15.0
    for i in tl.static_range(6, -1, -1):
        series = series * square + 1.0 / (2 * i + 1)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def store_gates(
    a,
    b,
    a_log,
    dt_bias,
    g,
    beta,
    first,
    count,
    a_stride,
    b_stride,
    HV: tl.constexpr,
    BH: tl.constexpr,
    BT: tl.constexpr,
):
    """``g = -exp(a_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)`` of ``count`` tokens from row ``first`` on.

    Arguments as in ``conv_prefill_kernel``; BT: at least ``count``; BH: power of two, at least HV.
    """
    lane, head = tl.arange(0, BT), tl.arange(0, BH)
    row = (first + lane).to(tl.int64)[:, None]
    inside = (lane < count)[:, None] & (head < HV)[None, :]
    rate = tl.exp(tl.load(a_log + head, mask=head < HV, other=0.0).to(tl.float32))
    shift = tl.load(dt_bias + head, mask=head < HV, other=0.0).to(tl.float32)
    step = tl.load(a + row * a_stride + head[None, :], mask=inside, other=0.0).to(tl.float32) + shift[None, :]
    tl.store(g + row * HV + head[None, :], -rate[None, :] * softplus(step), mask=inside)
    strength = tl.sigmoid(tl.load(b + row * b_stride + head[None, :], mask=inside, other=0.0).to(tl.float32))
    tl.store(beta + row * HV + head[None, :], strength.to(beta.dtype.element_ty), mask=inside)
