"""The artifact without its numbers: JSON, headers, checkpoint, ledger, manifest, verify, diff, inspect.

Nothing here imports torch, numpy or safetensors, so `inspect`, `verify` and `diff` start at once
and run anywhere.
"""
