"""What several cards quantize of one model, and one result made of it."""
