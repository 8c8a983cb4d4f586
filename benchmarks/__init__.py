"""Benchmarks: ``python -m benchmarks.report`` prints the tables, ``python -m pytest benchmarks`` runs pytest-benchmark.

Every arm's result is compared with the float64 recurrence before it is timed.
"""
