"""A data set on the hub: whether the hub answers at all."""

from huggingface_hub import HfApi, constants
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
        # what the library's client raises, whichever it is
        if not isinstance(error, OSError) and not type(error).__module__.startswith("http"):
            raise
        raise InputError(
            f"{name}: no file or folder here, and {constants.ENDPOINT} cannot be reached",
            "check the path and the network, or give a file",
        ) from error
