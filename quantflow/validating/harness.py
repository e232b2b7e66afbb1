"""Tasks of lm-eval on this runtime, which the extra `eval` installs.

lm-eval decides what is asked and how answers are scored; this module answers. Its requests are
token ids: the text is encoded as lm-eval's own class for transformers does it, so that both score
the same tokens. Requests are batched by length, padded on the left, and one whose tokens are those
of another is run once.

A task is a name that lm-eval knows, a shipped one (configs/tasks), or a YAML file. JSON lines that
a YAML names are read from beside it, without a cache and without the network.
"""

import difflib
import io
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import numpy as np
import torch
import yaml
from datasets import Dataset
from jinja2 import TemplateError
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import Task
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quantflow.errors import InputError, QuantflowError, UnsupportedError, UsageError, first_line
from quantflow.files.canonical import parse_json
from quantflow.files.folder import reading
from quantflow.progress import Progress
from quantflow.runtime.decoding import generate
from quantflow.runtime.decoding.text import before_end
from quantflow.runtime.load import Loaded
from quantflow.shipped import SHIPPED
from quantflow.sources.data_sets import cache_alone, why_unreachable

POSITIONS = 2048  # of a model that says nothing of its own
NEW_TOKENS = 256  # of a task that says nothing of its own; lm-eval's number
_ROWS, _LOGITS = 32, 1 << 26  # of a batch at most: 64 Mi logits are 256 MB
_TASK_BYTES, _TASK_DEPTH = 1 << 20, 50  # of a task's YAML at most
_SHIPPED = SHIPPED / "tasks"
_SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}  # lm-eval's own

Scored = tuple[float, bool]
Encoded = tuple[tuple[str, str] | None, list[int], list[int]]


class RuntimeModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A loaded artifact, or a model that is not quantized, as lm-eval asks it.

    Args:
        loaded: artifact or model with a tokenizer.
        progress: receiver of progress.
        stage: name of the work in progress.
    """

    def __init__(self, loaded: Loaded, *, progress: Progress, stage: str) -> None:
        """Keep the model.

        Raises:
            InputError: it has no tokenizer, or one without a token that ends a text.
        """
        super().__init__()
        name = loaded.artifact.checkpoint.folder
        if loaded.tokenizer is None or loaded.tokenizer.eos_token_id is None:
            raise InputError(
                f"{name}: no tokenizer with a token that ends a text", "add the tokenizer's files"
            )
        self.tokenizer = loaded.tokenizer
        self.decoder = loaded.decoder
        self.max_length = loaded.decoder.positions or POSITIONS
        self._ends = loaded.eos_token_ids
        self._folder, self._progress, self._stage = str(name), progress, stage

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """The name in lm-eval's caches, which are not used."""
        return self._folder

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The token ids of a text, with a BOS where the tokenizer puts one, never a second."""
        special = add_special_tokens
        if special is None:
            special = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=special)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the tokenizer's template writes it."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Scored]:
        """Log likelihood of each continuation, in nats, and whether greedy decoding says it."""
        del disable_tqdm  # the progress has bars of its own
        scored: list[Scored] = super().loglikelihood(requests, disable_tqdm=True)
        return scored

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log likelihood of whole texts, in nats, in windows of the model's positions."""
        del disable_tqdm
        windows: list[Encoded] = []
        counts = []
        for (text,) in (request.args for request in requests):
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows += [(None, *make_disjoint_window(part)) for part in parts]
            counts.append(len(windows) - before)
        scored = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scored)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(self, requests: Sequence[Encoded], **_: Any) -> list[Scored]:
        """Log likelihood of each continuation, in nats, and whether greedy decoding says it."""
        # the tokens that are run -> requests
        wanted: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_text, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                cause = (
                    f"{self._stage}: a continuation of {len(continuation)} tokens, "
                    f"the model has {self.max_length} positions"
                )
                raise UnsupportedError(cause, "leave this task out")
            ids = (context + continuation)[-(self.max_length + 1) :][:-1]
            wanted[tuple(ids)].append(number)
        scored: dict[int, Scored] = {}
        batches = list(self._batches(sorted(wanted, key=lambda ids: (-len(ids), ids))))
        for batch in self._progress.steps(batches, stage=self._stage, unit="batch"):
            logits = self._logits(batch)  # [B, T, V]
            for row, tokens in zip(logits, batch, strict=True):
                for number in wanted[tokens]:
                    said = torch.tensor(requests[number][2])
                    scores = row[-len(said) :].log_softmax(dim=-1)  # [C, V]
                    total = scores.gather(1, said[:, None]).sum()
                    scored[number] = (float(total), bool((scores.argmax(dim=-1) == said).all()))
        return [scored[number] for number in range(len(requests))]

    def _batches(self, rows: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Yield rows, the longest first, in batches whose logits fit."""
        start = 0
        while start < len(rows):
            count = max(1, min(_ROWS, _LOGITS // (len(rows[start]) * self.decoder.vocab_size)))
            yield list(rows[start : start + count])
            start += count

    @torch.inference_mode()
    def _logits(self, batch: Sequence[tuple[int, ...]]) -> Tensor:
        """The logits of rows, which end together, [B, T, V] float32 on the CPU."""
        ids, padding = self._padded(batch)
        self.decoder.begin(rows=len(batch), capacity=ids.shape[1])
        return self.decoder.forward(ids, padding=padding, last_only=False).float().cpu()

    def _padded(self, batch: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Rows padded on the left, [B, T], and the padding of each, [B]; None without any."""
        longest = max(map(len, batch))
        ids = torch.tensor(
            [[self.eot_token_id] * (longest - len(row)) + list(row) for row in batch]
        )
        padding = torch.tensor([longest - len(row) for row in batch])
        return ids.to(self.decoder.device), padding.to(self.decoder.device) if bool(
            padding.any()
        ) else None

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to the first stop string.

        Raises:
            UnsupportedError: the task samples, or its texts leave no room.
        """
        del disable_tqdm
        stop_at = self.tokenizer.decode(self.eot_token_id)
        groups: dict[tuple[tuple[str, ...], int], list[int]] = defaultdict(list)
        encoded = []
        for number, (text, arguments) in enumerate(request.args for request in requests):
            options = normalize_gen_kwargs(arguments, NEW_TOKENS)
            until = tuple(handle_stop_sequences(options.get("until"), eos=stop_at))
            new = int(options["max_gen_toks"])
            if options.get("do_sample"):
                raise UnsupportedError(
                    f"{self._stage}: the task samples ({arguments})",
                    "leave it out: it has no answer that is compared",
                )
            if new >= self.max_length:
                cause = (
                    f"{self._stage}: {new} new tokens, the model has {self.max_length} positions"
                )
                raise UnsupportedError(cause, "leave this task out")
            encoded.append(self.tok_encode(text)[-(self.max_length - new) :])
            groups[until, new].append(number)
        batches = []
        for (until, new), numbers in groups.items():
            numbers.sort(key=lambda number: (-len(encoded[number]), number))
            batches += [
                (until, new, numbers[at : at + _ROWS]) for at in range(0, len(numbers), _ROWS)
            ]
        answers: dict[int, str] = {}
        for until, new, numbers in self._progress.steps(batches, stage=self._stage, unit="batch"):
            ids, padding = self._padded([encoded[number] for number in numbers])
            made = generate(
                self.decoder,
                ids,
                max_new_tokens=new,
                padding=padding,
                eos_token_id=self._ends,
                pad_token_id=self.eot_token_id,
                stop=self._stop(until),
            )
            for number, row in zip(numbers, made[:, ids.shape[1] :].tolist(), strict=True):
                tokens = before_end(row, (*self._ends, self.eot_token_id))
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                answers[number] = postprocess_generated_text(text, list(until), None)
        return [answers[number] for number in range(len(requests))]

    def _stop(self, until: Sequence[str]) -> Callable[[Sequence[int]], bool]:
        """Whether a row's new tokens hold a stop string; only the end of them is new."""
        reach = max(len(text.encode()) for text in until) + 1 if until else 0

        def stops(tokens: Sequence[int]) -> bool:
            tail = self.tokenizer.decode(list(tokens)[-reach:])
            return any(text in tail for text in until)

        return stops


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The tasks and how they are asked.

    Attributes:
        names: tasks, groups and tags of lm-eval, shipped tasks, YAML files.
        limit: largest number of documents of each task; None is all.
        shots: number of examples before each question; None is the task's own.
        chat_template: whether questions stand in the tokenizer's chat template.
    """

    names: tuple[str, ...]
    limit: int | None = None
    shots: int | None = None
    chat_template: bool = False


@dataclass(frozen=True, kw_only=True)
class LoadedTasks:
    """Tasks with their documents, and the groups that they are parts of."""

    tasks: Mapping[str, Task]
    groups: Mapping[str, Group]

    def words(self) -> dict[str, Any]:
        """The tasks as arguments of lm-eval's evaluator."""
        children = {name: group.child_names for name, group in self.groups.items()}
        return {"tasks": dict(self.tasks), "groups": dict(self.groups), "group_map": children}


def loaded_tasks(options: TaskOptions) -> LoadedTasks:
    """The tasks with their documents; the first question of each has been written.

    Raises:
        UsageError: a name that nobody knows, two tasks of one name, a number of examples that a
            task does not take.
        InputError: a file or a data set that cannot be read, or whose columns are not those that
            the questions name.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    shipped = {path.stem: path for path in _SHIPPED.glob("*.yaml")}
    names = options.names
    files = {
        name: shipped.get(name, Path(name))
        for name in names
        if name in shipped or name.endswith((".yaml", ".yml"))
    }
    manager = _manager(any(name not in files for name in names))
    for name in names:
        if name not in files and name not in manager.all_tasks:
            close = difflib.get_close_matches(name, [*shipped, *manager.all_tasks], n=3)
            remedy = (
                f"did you mean {' or '.join(close)}?"
                if close
                else "see `lm-eval ls tasks`, or give a YAML file"
            )
            raise UsageError(
                f"task {name!r}: lm-eval {version('lm_eval')} has none of that name", remedy
            )
    tasks: dict[str, Task] = {}
    groups: dict[str, Group] = {}
    unreachable = None
    configs = {name: _readable(name, path) for name, path in files.items()}
    if any("custom_dataset" not in configs.get(name, {}) for name in names):
        unreachable = why_unreachable()
    for name in names:
        try:
            with (
                _seeded(),
                redirect_stderr(io.StringIO()),  # their bars of progress
                cache_alone() if unreachable else nullcontext(),
            ):
                loaded = manager.load([configs.get(name, name)])
                for task in loaded["tasks"].values():
                    _refuse_foreign(task)
                    _set_shots(task, options.shots)
                    task.build_all_requests(limit=1)
                    task.set_fewshot_seed(seed=_SEEDS["fewshot"])  # the first question drew from it
        except QuantflowError:
            raise
        except (
            Exception
        ) as error:  # what data sets, the hub, templates and a task's own Python raise
            if unreachable and isinstance(error, ConnectionError):
                raise InputError(
                    f"task {name}: its data set is not in the cache, and {unreachable}",
                    "connect to the hub once, or ask what needs none: "
                    f"{', '.join(sorted(shipped))}, or a YAML file with data beside it",
                ) from error
            raise _unusable(name, error) from error
        if twice := tasks.keys() & loaded["tasks"].keys():
            raise UsageError(f"task {min(twice)}: it is named twice", "name it once")
        tasks |= loaded["tasks"]
        groups |= loaded["groups"]
    return LoadedTasks(tasks=tasks, groups=groups)


@cache
def _manager(every: bool) -> TaskManager:
    """The loader of tasks.

    To know every name lm-eval reads thousands of files, which takes seconds.
    """
    return TaskManager(include_defaults=every)


def _refuse_foreign(task: Task) -> None:
    """Refuse a task that a model of text cannot be asked, or only by running what it writes.

    Raises:
        UnsupportedError: naming the task.
    """
    for attribute, what in (
        ("UNSAFE_CODE", "it runs code that a model writes"),
        ("MULTIMODAL", "it asks about pictures"),
    ):
        if getattr(task, attribute, False):
            raise UnsupportedError(f"task {task.config.task}: {what}", "leave it out")


def _set_shots(task: Task, shots: int | None) -> None:
    """Set the number of examples before each question, and their choice.

    Raises:
        UsageError: the task has none by its own rule; lm-eval would leave the number out without a
            word.
    """
    own = task.get_config("num_fewshot")
    if shots is not None and shots != own:
        if own == 0:
            raise UsageError(
                f"task {task.config.task}: {shots} examples, its own file says 0",
                "leave --shots out for it",
            )
        task.set_config(key="num_fewshot", value=shots)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_SEEDS["fewshot"])


@contextmanager
def _seeded() -> Iterator[None]:
    """Give the global generators lm-eval's own seeds, and put them back after.

    Tasks that shuffle their answers draw from them.
    """
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(_SEEDS["random"])
    np.random.seed(_SEEDS["numpy"])
    torch.manual_seed(_SEEDS["torch"])
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)


def _unusable(name: str, error: Exception) -> InputError:
    """What is said of a task that cannot be loaded."""
    return InputError(
        f"task {name}: {type(error).__name__}: {first_line(error)}",
        "check the file, or that the hub can be reached",
    )


def _readable(name: str, path: Path) -> dict[str, Any]:
    """The task of a file.

    Raises:
        InputError: as `_config` says, or it is no YAML.
    """
    try:
        return _config(path)
    except QuantflowError:
        raise
    except Exception as error:  # what a reader of YAML raises
        raise _unusable(name, error) from error


def _config(path: Path) -> dict[str, Any]:
    """A task's YAML, whose JSON lines are read from beside it.

    Raises:
        InputError: it is too large or too deep, has values that stand for more than they show, or
            names no task.
    """
    _refuse_growth(path)
    config: dict[str, Any] = load_yaml(path)
    if "task" not in config:
        raise InputError(
            f"{path}: no task", "write `task: NAME` and what it asks; configs/tasks has examples"
        )
    files = (config.get("dataset_kwargs") or {}).get("data_files")
    if config.get("dataset_path") == "json" and isinstance(files, dict):
        places = {split: path.parent / name for split, name in files.items()}
        config["dataset_kwargs"] = None
        config["custom_dataset"] = lambda **_: {
            split: Dataset.from_list(_lines(place)) for split, place in places.items()
        }
    return config


def _refuse_growth(path: Path) -> None:
    """Refuse a YAML that is too deep for lm-eval's reader, or that aliases make endless.

    The reader is C and calls itself.

    Raises:
        InputError: it is no file, over 1 MiB, deeper than 50, or an alias stands inside of what
            another alias repeats.
    """
    with reading(path) as file:
        text = file.read(_TASK_BYTES + 1)
    if len(text) > _TASK_BYTES:
        raise InputError(f"{path}: over {_TASK_BYTES} bytes", "give the YAML of a task")
    anchored: list[bool] = []  # of every collection that is open
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            anchored.append(event.anchor is not None)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchored.pop()
        elif isinstance(event, yaml.AliasEvent) and any(anchored):
            raise InputError(
                f"{path}: the alias {event.anchor} inside of an anchored value",
                "write the values out",
            )
        if len(anchored) > _TASK_DEPTH:
            raise InputError(
                f"{path}: values deeper in each other than {_TASK_DEPTH}", "give the YAML of a task"
            )


def _lines(path: Path) -> list[Any]:
    with reading(path) as file:
        lines = file.read().splitlines()
    rows = [
        parse_json(line, f"{path}: line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise InputError(f"{path}: holds no documents", "give a JSON object in each line")
    wrong = next(
        (number for number, row in enumerate(rows, start=1) if not isinstance(row, dict)), None
    )
    if wrong is not None:
        raise InputError(
            f"{path}: document {wrong} is no object", "give a JSON object in each line"
        )
    return rows


def evaluate(
    loaded: Loaded, options: TaskOptions, *, stage: str, progress: Progress
) -> dict[str, Any]:
    """lm-eval's own document about a model, samples included.

    The document leaves out what lm-eval adds about the machine and the hour, so one model has one
    document.

    Raises:
        QuantflowError: a task that cannot be loaded or asked, a model without a tokenizer or the
            template that is asked for.
    """
    model = RuntimeModel(loaded, progress=progress, stage=stage)
    if options.chat_template:
        refuse_no_template(model.tokenizer, model.tokenizer_name)
    asked = loaded_tasks(options)
    for task in asked.tasks.values():
        task.build_all_requests = _without_bars(task.build_all_requests)
    try:
        with _seeded():
            document: dict[str, Any] = lm_eval.evaluator.evaluate(
                model,
                task_dict=asked.words(),
                limit=options.limit,
                # lm-eval would start processes; two models are compared by their pairs of answers
                bootstrap_iters=0,
                apply_chat_template=options.chat_template,
                fewshot_as_multiturn=options.chat_template,
            )
    except TemplateError as error:
        raise InputError(
            f"{stage}: {first_line(error)}", "give every document what the task's questions name"
        ) from error
    for config in document["configs"].values():
        config.pop("custom_dataset", None)  # a function, whose name is an address
    seeds = {f"{name}_seed": seed for name, seed in _SEEDS.items()}
    return document | {
        "lm_eval_version": version("lm_eval"),
        "config": {"model": "quantflow", "limit": options.limit} | seeds,
    }


def _without_bars(build: Callable[..., None]) -> Callable[..., None]:
    def quiet(**keywords: Any) -> None:
        with redirect_stderr(io.StringIO()):
            build(**keywords)

    return quiet


def refuse_no_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        InputError: naming its folder.
    """
    if not tokenizer.chat_template:
        raise InputError(f"{name}: its tokenizer has no chat template", "leave --chat-template out")


def protocol(loaded: Loaded, options: TaskOptions) -> dict[str, Any]:
    """The properties besides the tasks that decide the tokens of the questions."""
    tokenizer: Any = loaded.tokenizer
    template = tokenizer.chat_template if options.chat_template else None
    return {
        "limit": options.limit,
        "shots": options.shots,
        "chat_template": template,
        "bos": tokenizer.bos_token_id is not None
        and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id],
        "lm_eval": version("lm_eval"),
        "dtype": "float32",
    }
