"""Recurrent-state checkpoints for hybrid Gated DeltaNet models in transformers."""

from .advice import Advice, AdvisedBoundary
from .advise import advise
from .config import CheckpointConfig
from .encode import encode, encode_chat
from .engine import Engine
from .errors import CheckpointError, CheckpointRuntimeError, CheckpointValueError, CheckpointWarning
from .handles import Handle
from .markers import MARKER, contains_marker, escape, marker_id, register_marker
from .outputs import GenerationOutput, HandleStatus
from .patching import clear, patch, reset_stats, stats, unpatch
from .stats import CheckpointStats, RowReport

__all__ = [
    "MARKER",
    "Advice",
    "AdvisedBoundary",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointRuntimeError",
    "CheckpointStats",
    "CheckpointValueError",
    "CheckpointWarning",
    "Engine",
    "GenerationOutput",
    "Handle",
    "HandleStatus",
    "RowReport",
    "advise",
    "clear",
    "contains_marker",
    "encode",
    "encode_chat",
    "escape",
    "marker_id",
    "patch",
    "register_marker",
    "reset_stats",
    "stats",
    "unpatch",
]
