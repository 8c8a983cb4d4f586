"""Digest of what a model computes: two equal digests mean that states of one are states of the other."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor, nn


def weights_identity(model: nn.Module) -> bytes:
    """Digest of the weights in memory: changes with every in-place update, assignment or load."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name}:{tensor.data_ptr()}:{_version(tensor)}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
    return digest.digest()


def adapters_identity(model: nn.Module) -> bytes:
    """Digest of which adapters are active, merged or disabled, and their scalings."""
    digest = hashlib.blake2b(digest_size=16)
    for name, module in model.named_modules():
        active: Any = getattr(module, "active_adapters", None)
        if active is None or callable(active):
            continue
        facts = (
            list(active),
            getattr(module, "disable_adapters", None),
            getattr(module, "merged_adapters", None),
            getattr(module, "scaling", None),
        )
        digest.update(f"{name}:{facts!r};".encode())
    return digest.digest()


def _version(tensor: Tensor) -> int:
    # Tensors made under inference_mode keep no version counter.
    return -1 if tensor.is_inference() else tensor._version
