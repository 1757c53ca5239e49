"""Everything that touches a device: loading, attention, the forward pass, sampling."""
