"""Artifacts on their way to the hub: the card that people find there, and the upload."""
