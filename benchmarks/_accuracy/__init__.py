"""The parts of accuracy.py: models and text, the compared programs, the evaluation, results."""
