"""The audit of workers by each other: canaries, and the quarantine of a worker that computes something else."""
