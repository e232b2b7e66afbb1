"""A recipe as records, and what becomes of each linear: schemes, compatibility, memory, time."""
