"""Numbers about a model: perplexity, divergence from its baseline, and how far the text's chance may have moved them.

No verdicts here: a gate compares these numbers with limits.
"""
