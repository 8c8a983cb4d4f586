"""The error that ``ckpt_ops`` raises for whatever a caller got wrong."""

from __future__ import annotations


class ArgumentError(ValueError):
    """An argument of an op is wrong; the message names it, what was wrong and what is allowed."""
