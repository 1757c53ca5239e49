"""Products with packed weights, in fp32 and in int8."""
