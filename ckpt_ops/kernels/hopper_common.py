"""What the kernels for sm_90 share."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import async_copy

# Triton 3.7 renamed it.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
