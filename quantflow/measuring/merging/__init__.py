"""The statistics of several ranks merged into those of one, each by the rule that it has."""
