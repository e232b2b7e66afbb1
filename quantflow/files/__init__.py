"""Files of models and artifacts: JSON, headers, checkpoints, ledger, manifest, verify, diff.

Nothing here imports torch, numpy or safetensors, so `inspect`, `verify` and `diff` start at once
and run anywhere.
"""
