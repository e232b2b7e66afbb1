"""Schemes chosen linear by linear, for a number of bits or a divergence."""
