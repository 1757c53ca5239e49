"""The operators' arguments other than tensors: plain data, the same for every device."""
