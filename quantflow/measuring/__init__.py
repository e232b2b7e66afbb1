"""Calibration text as token sequences, and what they show of a model: statistics and gradients."""
