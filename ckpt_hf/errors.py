"""The project's own exception and warning types.

Every error that a caller can cause derives from :class:`CheckpointError` and from the built-in type that a user of
transformers would catch, so both ``except ValueError`` and ``except CheckpointError`` work.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of all errors raised by ``ckpt_hf``."""


class CheckpointValueError(CheckpointError, ValueError):
    """An argument is wrong; the message names it, what was wrong and what is allowed."""


class CheckpointRuntimeError(CheckpointError, RuntimeError):
    """The call was fine but the model, the device or the state of the engine does not allow it."""


class CheckpointWarning(UserWarning):
    """A marker could not be used as written; the request was served all the same."""
