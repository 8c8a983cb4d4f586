"""Digest of what a model computes: two equal digests mean that states of one are states of the other."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# An address alone would not do: the allocator gives that of a replaced parameter to the next one of its size.
_serials = WeakTensorKeyDictionary()
_next_serial = itertools.count()


def weights_identity(model: nn.Module) -> bytes:
    """Digest of the weights in memory: changes with every in-place update, assignment or load."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (serial := _serials.get(tensor)) is None:
            serial = _serials[tensor] = next(_next_serial)
        facts = (name, serial, tensor.data_ptr(), _version(tensor), tensor.dtype, tuple(tensor.shape))
        digest.update(f"{facts!r};".encode())
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
