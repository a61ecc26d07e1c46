"""Metrics, status, logs, console: everything that watches a run."""
