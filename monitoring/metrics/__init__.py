"""The metrics as data, read from snapshots when Prometheus asks."""
