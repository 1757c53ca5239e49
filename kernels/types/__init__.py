"""The operators' arguments in addition to tensors: plain data, the same for every device."""
