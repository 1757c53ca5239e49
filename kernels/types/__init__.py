"""The operators' arguments beside tensors: plain data, the same for every device."""
