"""The queue: rates, fairness, simulated workers."""
