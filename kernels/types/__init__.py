"""What operators take beside tensors; plain data, the same for every face."""
