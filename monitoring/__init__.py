"""Metrics, health and logs. Reads snapshots, never the insides of the engine."""
