"""Recurrent-state checkpoints for hybrid Gated DeltaNet models in transformers."""

from .config import CheckpointConfig
from .errors import CheckpointError, CheckpointRuntimeError, CheckpointValueError, CheckpointWarning
from .markers import MARKER, escape, register_marker
from .patching import clear, patch, reset_stats, stats, unpatch
from .stats import CheckpointStats, RowReport

__all__ = [
    "MARKER",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointRuntimeError",
    "CheckpointStats",
    "CheckpointValueError",
    "CheckpointWarning",
    "RowReport",
    "clear",
    "escape",
    "patch",
    "register_marker",
    "reset_stats",
    "stats",
    "unpatch",
]
