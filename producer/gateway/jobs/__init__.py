"""The jobs page: the jobs in the queue, their history, and an operator's actions."""
