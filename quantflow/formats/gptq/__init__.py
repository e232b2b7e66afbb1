"""GPTQ's layout, and AutoRound's format: the same tensors with another configuration."""
