"""A decoder over ranks: each holds some rows of every linear, and outputs are exchanged."""
