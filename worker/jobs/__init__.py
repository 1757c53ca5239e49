"""One job from pull to end: admission, progress, leases, the final write."""
