"""Identity of a checkpoint: a digest of everything that its states depend on.

The digest covers the exact token ids up to the boundary, the model's identity (weights, adapters) and the caller's
salt. It does not depend on where other boundaries of the same prompt lie.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 32


def checkpoint_keys(
    token_ids: Sequence[int], boundaries: Sequence[int], identity: bytes, salt: str
) -> tuple[bytes, ...]:
    """Digests of the prefixes of ``token_ids`` that end at ``boundaries``.

    Args:
        token_ids: the stripped prompt.
        boundaries: strictly increasing prefix lengths, each between 1 and ``len(token_ids)``.
        identity: digest of the model that computes the states.
        salt: callers with different salts never share a checkpoint.

    Returns:
        One 32-byte digest per boundary, in the same order.
    """
    secret = salt.encode("utf-8", "surrogatepass")
    running = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (identity, secret):
        # Each part is preceded by its length, so that no two (identity, salt) pairs give the same byte stream.
        running.update(len(part).to_bytes(8, "little") + part)
    keys = []
    start = 0
    for boundary in boundaries:
        running.update(array("q", token_ids[start:boundary]).tobytes())
        keys.append(running.copy().digest())
        start = boundary
    return tuple(keys)
