"""Weights in GPTQ's words: the layout itself, and AutoRound's format, which has its tensors in another configuration."""
