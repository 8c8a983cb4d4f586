"""Recurrent-state checkpoints for hybrid Gated DeltaNet models in transformers."""

from .advice import Advice, AdvisedBoundary
from .advise import advise
from .audit import AuditError, Auditor, AuditReport
from .config import CheckpointConfig
from .encode import encode, encode_chat
from .engine import Engine
from .errors import CheckpointError, CheckpointRuntimeError, CheckpointValueError, CheckpointWarning
from .handles import Handle
from .markers import MARKER, contains_marker, escape, marker_id, register_marker
from .metrics import Metrics
from .observe import audit_hits, collect_metrics, write_trace
from .outputs import GenerationOutput, HandleStatus
from .patching import clear, patch, reset_stats, stats, unpatch
from .prometheus import export_prometheus
from .reasons import Reason
from .stats import CheckpointStats, RowReport

__all__ = [
    "MARKER",
    "Advice",
    "AdvisedBoundary",
    "AuditError",
    "AuditReport",
    "Auditor",
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
    "Metrics",
    "Reason",
    "RowReport",
    "advise",
    "audit_hits",
    "clear",
    "collect_metrics",
    "contains_marker",
    "encode",
    "encode_chat",
    "escape",
    "export_prometheus",
    "marker_id",
    "patch",
    "register_marker",
    "reset_stats",
    "stats",
    "unpatch",
    "write_trace",
]
