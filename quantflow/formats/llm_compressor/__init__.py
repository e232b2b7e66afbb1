"""compressed-tensors as llm-compressor and others write it, and the layout as one that folders are converted to."""
