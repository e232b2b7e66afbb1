"""Data sets on the hub: whether the hub answers at all, and the cache alone where it does not."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from quantflow.errors import InputError

SECONDS = 10.0


def require_reachable(name: str) -> None:
    """Ask the hub for a data set once, since the package `datasets` tries again for 40 seconds.

    What the hub answers is left to that package.

    Raises:
        InputError: the hub does not answer, or nothing there can have this name.
    """
    try:
        HfApi().dataset_info(name, timeout=SECONDS)
    except HfHubHTTPError:
        return
    except HFValidationError as error:
        raise InputError(
            f"{name}: no file or folder here, and no name of a data set",
            "check the path, or give org/name",
        ) from error
    except OfflineModeIsEnabled as error:
        why = "HF_HUB_OFFLINE is set"
        raise InputError(f"{name}: {why}", "connect to the hub, or give a file") from error
    except Exception as error:
        if not _is_no_answer(error):
            raise
        raise InputError(
            f"{name}: no file or folder here, and {constants.ENDPOINT} cannot be reached",
            "check the path and the network, or give a file",
        ) from error


def why_unreachable() -> str | None:
    """Why the hub does not answer, in a sentence; None where it does. It is asked once."""
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except Exception as error:
        if not _is_no_answer(error):
            raise
        return f"{constants.ENDPOINT} cannot be reached"
    return None


@contextmanager
def cache_alone() -> Iterator[None]:
    """A block in which the package `datasets` reads its cache, and asks no hub.

    Where the hub does not answer it would try again for half a minute, for each data set, and read
    its cache then.
    """
    from datasets import config

    with ExitStack() as stack:
        libraries: tuple[Any, ...] = (config, constants)
        for library in libraries:
            stack.callback(setattr, library, "HF_HUB_OFFLINE", library.HF_HUB_OFFLINE)
            library.HF_HUB_OFFLINE = True
        yield


def _is_no_answer(error: Exception) -> bool:
    """Whether an error is what the library's client raises where nobody answers."""
    return isinstance(error, OSError) or type(error).__module__.startswith("http")
