"""The life of a job on a worker: admission, progress, leases, the final write."""
