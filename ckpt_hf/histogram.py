"""A histogram with fixed buckets: constant memory, however much it has seen."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class Histogram:
    """Counts of values up to each of ``bounds`` (increasing), and of those above the last one."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count one value; a bound belongs to the bucket below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def quantile(self, share: float) -> float | None:
        """The value below which about ``share`` (0 to 1) of the values lie, interpolated within its bucket.

        None without values; the last bound for those above it.
        """
        if not self.count:
            return None
        rank, below = share * self.count, 0
        for i, bound in enumerate(self.bounds):
            inside = self.counts[i]
            if inside and below + inside >= rank:
                start = self.bounds[i - 1] if i else 0.0
                return float(start + (bound - start) * max(rank - below, 0.0) / inside)
            below += inside
        return float(self.bounds[-1])

    def as_dict(self) -> dict[str, object]:
        """Count, sum, mean, estimated median and 95th percentile, and the cumulated buckets by their upper bound."""
        cumulated, total = {}, 0
        for bound, inside in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += inside
            cumulated[bound] = total
        mean = self.sum / total if total else None
        return {
            "count": total,
            "sum": self.sum,
            "mean": mean,
            "p50": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "buckets": cumulated,
        }
