"""The thin inference runtime: open an artifact, run its linears with a chosen backend, decode."""
