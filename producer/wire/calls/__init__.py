"""Every script call, as a function that returns a `Call`."""
