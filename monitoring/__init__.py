"""Metrics, health and logs. Reads snapshots, never the engine's internals."""
