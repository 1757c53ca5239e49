"""Matmuls with packed weights, in fp32, bf16 and int8."""
