"""Which calibration sequences are looked at when only some of them are."""


def turns(samples: int, sequences: int) -> list[list[int]]:
    """Return the sequences of each step until all had their turn: far apart, since neighbours may be alike.

    Args:
        samples: how many there are.
        sequences: of each step, at most.
    """
    count = -(-samples // sequences)
    return [list(range(first, samples, count)) for first in range(count)]


def spread(samples: int, most: int) -> list[int]:
    """Return at most so many sequences, at equal distances."""
    count = min(samples, most)
    return [index * samples // count for index in range(count)]
