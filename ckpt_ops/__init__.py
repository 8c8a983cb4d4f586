"""Gated DeltaNet ops over pools of states: packed two-phase prefill, convolution and decode.

Importing this package registers ``torch.ops.ckpt_ops``; Triton is imported when the first CUDA tensor arrives.

Under ``torch.compile`` give a compiled region that serves several layers each layer's pool itself, or a view of a
larger tensor made outside of the region. Torch 2.13 writes through a view of a view, made inside, to the offset that it
saw when it compiled.
"""

from ckpt_ops.api import check_gates, gdn_decode, gdn_prefill, two_phase_gdn_prefill
from ckpt_ops.api_conv import causal_conv1d_decode, causal_conv1d_prefill, conv_gates_decode, conv_gates_prefill
from ckpt_ops.errors import ArgumentError
from ckpt_ops.precompile import warmup
from ckpt_ops.segments import Segment, SegmentTable

__all__ = [
    "ArgumentError",
    "Segment",
    "SegmentTable",
    "causal_conv1d_decode",
    "causal_conv1d_prefill",
    "check_gates",
    "conv_gates_decode",
    "conv_gates_prefill",
    "gdn_decode",
    "gdn_prefill",
    "two_phase_gdn_prefill",
    "warmup",
]
