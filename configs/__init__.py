"""Recipes, gates and QUANT_CONFIG presets, shipped as data and found by their names."""
