"""One job from its pull to its end: admission, progress, leases, the final write."""
