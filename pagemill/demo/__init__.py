"""A real labeling job on this machine: rows, model, worker and queue."""
