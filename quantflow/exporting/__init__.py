"""The artifact's files: weights, ledger, model card, other runtimes' files, and the proof."""
