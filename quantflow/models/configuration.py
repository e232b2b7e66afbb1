"""A checkpoint's configuration as transformers understands it, without its model code, which takes seconds to import."""

from transformers import AutoConfig, PreTrainedConfig

from quantflow.artifact.checkpoint import Checkpoint
from quantflow.errors import InputError
from quantflow.models.graph import family_for


def load_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the checkpoint's configuration; code that comes with the checkpoint is not run.

    Raises:
        InputError: transformers refuses the configuration.
        UnsupportedError: the family is not supported.
    """
    family_for(checkpoint.config.get("model_type"), checkpoint.config.get("architectures"))
    try:
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises what its validators raise: no narrower common base than this
        raise InputError(
            f"{checkpoint.folder / 'config.json'}: {first_line(error)}", "repair config.json or download it again"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of what a library says, or the error's class where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)
