"""What counts as an integer among the values that a user hands over."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch


def is_integer(value: Any) -> bool:
    """Whether ``operator.index`` takes ``value``, of Python, numpy or torch, and it is no truth value."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, (bool, np.bool_)) and getattr(value, "dtype", None) is not torch.bool
