"""The page of jobs: what is in the queue, how it came there, and what an operator does about it."""
