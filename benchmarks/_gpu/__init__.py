"""The checks of gpu.py, and what they find. A check is a function of a `record.Place` that tells a `record.Found`."""
