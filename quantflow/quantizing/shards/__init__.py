"""Each card's part of a model that several cards quantize."""
