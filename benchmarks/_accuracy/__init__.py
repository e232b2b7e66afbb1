"""The parts of accuracy.py: models and text, the programs that are compared, the evaluation, results."""
