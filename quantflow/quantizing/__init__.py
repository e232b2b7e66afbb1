"""The engines: layer by layer, file to file, several cards, mixed precision, and tuned scales."""
