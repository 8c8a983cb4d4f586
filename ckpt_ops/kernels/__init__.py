"""Triton kernels; imported by :mod:`ckpt_ops.launch` only."""
