"""Gated DeltaNet ops over pools of states: packed two-phase prefill, convolution and decode.

Importing this package registers ``torch.ops.ckpt_ops``; Triton is imported when the first CUDA tensor arrives.
"""

from ckpt_ops.api import (
    causal_conv1d_decode,
    causal_conv1d_prefill,
    check_gates,
    gdn_decode,
    gdn_prefill,
    two_phase_gdn_prefill,
)
from ckpt_ops.errors import ArgumentError
from ckpt_ops.segments import Segment, SegmentTable

__all__ = [
    "ArgumentError",
    "Segment",
    "SegmentTable",
    "causal_conv1d_decode",
    "causal_conv1d_prefill",
    "check_gates",
    "gdn_decode",
    "gdn_prefill",
    "two_phase_gdn_prefill",
]
