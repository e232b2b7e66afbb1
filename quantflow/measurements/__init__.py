"""What one card saw of a model, as files: written and read (record), and merged over cards (unify)."""
