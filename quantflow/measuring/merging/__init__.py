"""The statistics of several ranks become those of one: who belongs together, and which rule each statistic has."""
