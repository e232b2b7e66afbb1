"""The order in which a learning algorithm visits calibration sequences."""


def turns(samples: int, sequences: int) -> list[list[int]]:
    """The sequences of each step until every one was visited once.

    Those of a step lie far apart, since neighbours may be alike.

    Args:
        samples: number of calibration sequences.
        sequences: most sequences of a step.
    """
    count = -(-samples // sequences)
    return [list(range(first, samples, count)) for first in range(count)]


def spread(samples: int, most: int) -> list[int]:
    """Indices of at most `most` of `samples` sequences, at equal distances."""
    count = min(samples, most)
    return [index * samples // count for index in range(count)]
