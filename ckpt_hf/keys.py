"""Identity of a checkpoint: a digest of everything that its states depend on.

The digest covers the exact token ids up to the boundary, the content of the images and videos before it, the model's
identity (weights, adapters) and the caller's salt. It does not depend on where other boundaries of the same prompt lie.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .errors import CheckpointValueError

DIGEST_BYTES = 32
TOKEN_BYTES = 8
_MIN_MEDIA_DIGEST_BYTES = 16
_MEDIA_FOLLOWS = (-1).to_bytes(8, "little", signed=True)

Media: TypeAlias = Sequence[tuple[int, bytes]]
"""Images and videos of a prompt: position of the first placeholder, digest of the processed content and its grid."""


@dataclass(frozen=True, slots=True)
class KeyScope:
    """Who may share checkpoints: requests of one model in one state that carry one salt.

    Attributes:
        identity: digest of the model that computes the states, with its adapters.
        salt: callers with different salts never share a checkpoint.
    """

    identity: bytes
    salt: str = ""

    def keys(self, token_ids: Sequence[int], boundaries: Sequence[int], media: Media = ()) -> tuple[bytes, ...]:
        """Digests of the prefixes of ``token_ids`` that end at ``boundaries``.

        Args:
            token_ids: the stripped prompt.
            boundaries: strictly increasing prefix lengths, each between 1 and ``len(token_ids)``.
            media: in order of position. Placeholder ids are the same for every image, so what they stand for is a part
                of the key of each boundary behind it.

        Returns:
            One 32-byte digest per boundary, in the same order.

        Raises:
            CheckpointValueError: a media digest of fewer than 16 bytes, which somebody could collide with.
        """
        secret = self.salt.encode("utf-8", "surrogatepass")
        running = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in (self.identity, secret):
            # Each part is preceded by its length, so that no two (identity, salt) pairs give the same byte stream.
            running.update(len(part).to_bytes(8, "little") + part)
        keys = []
        start = 0
        items = list(media)
        for boundary in boundaries:
            while items and items[0][0] < boundary:
                position, content = items.pop(0)
                if len(content) < _MIN_MEDIA_DIGEST_BYTES:
                    raise CheckpointValueError(
                        f"media digest at position {position} has {len(content)} bytes; at least "
                        f"{_MIN_MEDIA_DIGEST_BYTES} are needed"
                    )
                running.update(pack_tokens(token_ids[start:position]))
                # No token has the id -1, so the content cannot pass for tokens.
                running.update(_MEDIA_FOLLOWS + len(content).to_bytes(8, "little") + content)
                start = position
            running.update(pack_tokens(token_ids[start:boundary]))
            keys.append(running.copy().digest())
            start = boundary
        return tuple(keys)


CONTENT = KeyScope(b"")
"""Scope of the content alone: equal for all models and callers. Tells why one was missed, never a way to share."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes, 8 each: equal prefixes of prompts are equal prefixes of bytes."""
    return array("q", token_ids).tobytes()
