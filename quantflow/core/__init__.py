"""Numbers: schemes as data, the quantized tensor, rounding, float8, groups and bit packing."""
