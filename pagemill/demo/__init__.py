"""A real labelling job on this machine: rows, model, worker and queue."""
