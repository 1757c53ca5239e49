"""What the KV cache holds, and how much of it is of use."""
