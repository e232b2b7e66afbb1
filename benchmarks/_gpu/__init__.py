"""The checks of gpu.py, and their findings.

A check is a function of a `record.Place` that fills a `record.Found`.
"""
