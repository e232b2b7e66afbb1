"""Prompts from a file, a folder of splits or a hub name, and their tokens."""

import csv
import io
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from transformers import PreTrainedTokenizerBase

from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.files.canonical import parse_json, read_json
from quantflow.files.folder import reading
from quantflow.models.chat_form import goes_on
from quantflow.models.chat_template import chat_tokens
from quantflow.models.token_ids import tokens_of
from quantflow.sources.data_sets import require_reachable

Prompt = str | list[dict[str, str]]  # a text, or the messages of a conversation
_SUFFIXES = (".txt", ".json", ".jsonl", ".csv", ".parquet")
_SPLITS = ("test", "validation", "train")  # the first that a data set has is taken


def read_prompts(
    source: str, *, column: str | None = None, limit: int | None = None
) -> list[Prompt]:
    """Read prompts.

    Args:
        source: .txt file (prompts separated by blank lines), .json (a list, or a table of texts
            by length), .jsonl, .csv or .parquet; a folder with one of these per split; or the name
            of a data set on the hub, which the package `datasets` reads. Of several splits the
            first of test, validation and train is taken.
        column: key of the rows; None takes the first that holds a text in the first row.
        limit: number of prompts that are taken, the first ones; None takes all.

    Raises:
        InputError: a file that cannot be read, or rows without such a column.
        UnsupportedError: parquet without pyarrow, a hub name without datasets.
        UsageError: a limit below 1, or a column where the source has none.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit={limit}", "use 1 or more")
    path = Path(source)
    if path.is_dir():
        path = _split_of(path)
    rows = _rows(path) if path.is_file() else _from_hub(source)
    prompts = [
        _prompt(row, number, column, source=source)
        for number, row in enumerate(islice(rows, limit), start=1)
    ]
    if not prompts:
        raise InputError(f"{source}: holds no prompt", "give a file with prompts in it")
    return prompts


def encode(
    prompts: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase, *, limit: int | None, chat: bool
) -> list[list[int]]:
    """The tokens of each prompt.

    Args:
        prompts: texts, or conversations.
        tokenizer: adds BOS to texts as it always does.
        limit: number of tokens that are kept, the first ones; None keeps all.
        chat: put each text as the user's message into the chat template; conversations always go
            through it. A last message of the assistant is continued.

    Raises:
        UsageError: a limit below 1, a conversation without a chat template, or a prompt without a
            token.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"max_input_tokens={limit}", "use 1 or more")
    prompts_ids = []
    for number, prompt in enumerate(prompts, start=1):
        if chat or not isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            tokens = _from_chat(messages, tokenizer, number)
        else:
            tokens = tokens_of(tokenizer, prompt, where=f"prompt {number}")
        if not tokens:
            raise UsageError(
                f"prompt {number}: {prompt!r} has no token", "give a text of a token or more"
            )
        prompts_ids.append(tokens[:limit])
    return prompts_ids


def shown(prompt: Prompt) -> str:
    """A prompt as text for people: the last message of a conversation."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _from_chat(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, number: int
) -> list[int]:
    if tokenizer.chat_template is None:
        raise UsageError(
            f"prompt {number}: a chat, but the tokenizer has no chat template",
            "leave out --chat, or use a chat model",
        )
    return chat_tokens(
        tokenizer, messages, where=f"prompt {number}", answer=True, continues=goes_on(messages)
    )


def _split_of(folder: Path) -> Path:
    """The file of a folder that holds the first split, or its only file."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES)
    for split in _SPLITS:
        for path in files:
            if path.stem.startswith(split):
                return path
    if len(files) != 1:
        cause = f"{folder}: {len(files)} files, none of which is called {', '.join(_SPLITS)}"
        raise InputError(cause, f"name one {', '.join(_SUFFIXES)} file")
    return files[0]


def _rows(path: Path) -> Iterator[Any]:
    """Yield the rows of a file: texts, or mappings from a column to a value."""
    if path.suffix == ".parquet":
        yield from _from_parquet(path)
        return
    if path.suffix not in _SUFFIXES:
        raise InputError(
            f"{path}: suffix {path.suffix!r} is not known", f"use one of {', '.join(_SUFFIXES)}"
        )
    if path.suffix == ".json":
        rows = read_json(path)
        if isinstance(rows, dict) and rows:
            rows = [_by_length(rows)]
        if not isinstance(rows, list):
            raise InputError(
                f"{path}: {type(rows).__name__}, a list is needed", "give a list of prompts"
            )
        yield from rows
        return
    with reading(path) as file:
        data = file.read()
    try:
        text = data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error})", "convert it to UTF-8") from error
    if path.suffix == ".txt":
        yield from (part.strip("\n") for part in text.split("\n\n") if part.strip())
    elif path.suffix == ".csv":
        try:
            yield from csv.DictReader(io.StringIO(text, newline=""), restkey="")
        except csv.Error as error:
            raise InputError(
                f"{path}: not CSV ({error})", "give shorter fields, or .jsonl"
            ) from error
    else:
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield parse_json(line.encode(), f"{path}: line {number}")


def _by_length(table: dict[str, Any]) -> dict[str, Any]:
    """The row of a table of texts by their lengths, as Intel's runner has them.

    Such a table is {"input": {"32": TEXT, "64": TEXT}}. A column is a length; with several tables,
    such as one per family, it is family/length.
    """
    inner = {name: texts for name, texts in table.items() if isinstance(texts, dict)}
    if len(inner) == len(table) == 1:
        return dict(next(iter(inner.values())))
    return {
        **{key: value for key, value in table.items() if key not in inner},
        **{f"{name}/{key}": value for name, texts in inner.items() for key, value in texts.items()},
    }


def _from_parquet(path: Path) -> Iterator[Any]:
    if find_spec("pyarrow") is None:
        raise UnsupportedError(
            f"{path}: parquet is read by pyarrow, which is not installed",
            "install it, or give .jsonl",
        )
    from pyarrow import ArrowException, parquet

    try:
        for group in parquet.ParquetFile(path).iter_batches():
            yield from group.to_pylist()
    except (ArrowException, OSError) as error:
        raise InputError(f"{path}: {error}", "restore the file from where it came from") from error


def _from_hub(name: str) -> Iterator[Any]:
    if find_spec("datasets") is None:
        cause = (
            f"{name}: no file or folder here, and hub names are read by the package datasets, "
            "which is not installed"
        )
        raise UnsupportedError(cause, "check the path, or install datasets")
    if not constants.HF_HUB_OFFLINE:  # where it is set, the package reads its cache at once
        require_reachable(name)
    from datasets import load_dataset

    try:
        splits = load_dataset(name)
    except Exception as error:  # the package raises what its readers and its network raise
        raise InputError(
            f"{name}: {error}", "check the name and the network, or download the data set"
        ) from error
    yield from splits[next((split for split in _SPLITS if split in splits), next(iter(splits)))]


def _prompt(row: Any, number: int, column: str | None, *, source: str) -> Prompt:
    where = f"{source}: row {number}"
    if isinstance(row, str):
        if column is not None:
            raise UsageError(
                f"{where}: a text, column {column} was asked for", "leave out --column"
            )
        return row
    if not isinstance(row, dict):
        raise InputError(
            f"{where}: {type(row).__name__}, a text or an object is needed",
            "give one prompt per row",
        )
    name = column or next(
        (key for key, value in row.items() if isinstance(value, str) or _is_chat(value)), None
    )
    if name not in row:
        raise InputError(
            f"{where}: no column {name or 'with a text'} among {', '.join(map(str, row))}",
            "give --column",
        )
    value: Prompt = row[name]
    if not isinstance(value, str) and not _is_chat(value):
        raise InputError(
            f"{where}: {name} is {type(value).__name__}, a text or messages are needed",
            "give another --column",
        )
    return value


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(part, dict)
            and isinstance(part.get("role"), str)
            and isinstance(part.get("content"), str)
            for part in value
        )
    )
