"""The job of `calibration continue`, without torch, so that the command line starts fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantflow.errors import UsageError
from quantflow.progress import SILENT, Progress
from quantflow.runtime.generate_job import DTYPES
from quantflow.settings import check_numbers, setting

CONTINUE = ("continue",)


@dataclass(frozen=True, kw_only=True)
class ContinueJob:
    """Prompts that a model continues.

    Attributes:
        model: an artifact or a model.
        prompts: a file, folder or hub name, see `generate --prompts`; the first `samples` of
            `column`.
        output: the file, .safetensors.
        new_tokens: largest number of tokens added to each text; it ends with an end token too.
        max_input_tokens: largest number of tokens of each prompt, its first ones.
        chat: prompts are a user's messages.
        temperature, seed: temperature and seed of drawn tokens; None takes the likeliest.
        batch_size: number of prompts that are continued together.
    """

    model: Path
    output: Path
    prompts: str = setting(
        flag="--prompts",
        metavar="FILE|DIR|NAME",
        verbs=CONTINUE,
        help="As `generate --prompts` reads them.",
    )
    column: str | None = setting(
        None, flag="--column", metavar="KEY", verbs=CONTINUE, help="Column of --prompts."
    )
    samples: int = setting(
        128, flag="--samples", verbs=CONTINUE, least=1, shown=True, help="Prompts at most."
    )
    new_tokens: int = setting(
        64,
        flag="--new-tokens",
        verbs=CONTINUE,
        least=1,
        shown=True,
        help="Tokens added to each at most.",
    )
    max_input_tokens: int | None = setting(
        None,
        flag="--max-input-tokens",
        metavar="N",
        verbs=CONTINUE,
        least=1,
        help="The first N tokens of each prompt.",
    )
    chat: bool = setting(
        False, flag="--chat", verbs=CONTINUE, help="Put prompts into the chat template."
    )
    temperature: float | None = setting(
        None, flag="--temperature", verbs=CONTINUE, help="Draw tokens (default: the likeliest)."
    )
    seed: int = setting(0, flag="--seed", verbs=CONTINUE, shown=True, help="Of drawn tokens.")
    batch_size: int = setting(
        8, flag="--batch-size", verbs=CONTINUE, least=1, shown=True, help="Prompts at once."
    )
    dtype: str = setting(
        "float32", flag="--dtype", choices=DTYPES, verbs=CONTINUE, shown=True, help=""
    )

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing, and a file that `measure` would read as text.

        Raises:
            UsageError: naming it.
        """
        check_numbers(self)
        if self.output.suffix != ".safetensors":
            raise UsageError(
                f"{self.output}: token ids are written as safetensors", "name a file.safetensors"
            )

    def run(self, progress: Progress = SILENT) -> dict[str, Any]:
        """Continue the prompts, and write the token ids, a calibration text for `measure`.

        Returns:
            `file`, `sequences`, `prompt_tokens`, `new_tokens`.

        Raises:
            QuantflowError: the model or the prompts cannot be read, or not be decoded.
        """
        from quantflow.measuring.continued import run

        return run(self, progress)
