"""Recipes as records, and what they mean for a model: schemes, compatibility, memory and time."""
