"""The first check of every restricted reader: a pickle allocates no more than it holds."""

import pickletools
from collections.abc import Callable

MAX_STEPS = 5_000_000  # an array takes some 40
_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"})


def scan(data: bytes, refuse: Callable[[str], Exception]) -> None:
    """Refuse a pickle that would make Python allocate memory for what it does not hold.

    One opcode can ask for a memo of 2 ** 32 entries.

    Args:
        data: bytes of the pickle; nothing of it is run.
        refuse: function from what the pickle asks for, in words, to the error.

    Raises:
        Exception: the error from `refuse`; or any that a damaged pickle makes `pickletools` raise.
    """
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if count >= MAX_STEPS:
            raise refuse(f"more than {MAX_STEPS} steps")
        if opcode.name in _MEMO and not 0 <= int(argument or 0) <= count:
            raise refuse(f"a memo of {argument} entries after {count} steps")
