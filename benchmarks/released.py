"""Released repositories, as they lie on the hub, through every command.

    python benchmarks/released.py                        # all, some seconds each
    python benchmarks/released.py --only gpt2 qwen       # those whose name contains one of these
    python benchmarks/released.py --table                # run nothing, print what was found
    python benchmarks/released.py --table --write-docs   # write it into docs/released.md too

Each entry of released/ is one repository of the hub: its config.json, the names, dtypes and layout
of its tensors, and its side files, from public sources that it cites. It is made as a tiny random
model (_released_models.py), whose tensors must be called exactly as the released ones are.

Then it goes through the commands: inspect, plan, and for W4A16 (gptq) and FP8_DYNAMIC: quantize,
export with its proof, verify, a look for the side files, generate, and stock transformers. That
must load the artifact with no key missing, mismatched or unexpected that is not so with the source,
answer nearly as it answers with the source, and as our runtime answers with the artifact.

One that is quantized already is inspected and generated from, its dequantized weights must answer
nearly as the model did before, and they are quantized again. One that has to be refused says with
which words, and which commands must say them.

One process imports torch and transformers; every repository runs in a fork of it, and so does each
proof. It exits 1 when a repository could not be made, or when something of ours refuses an
artifact that `export` gave out as proved.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _forks import ForkError, first_line, in_fork
from _released_models import Entry, Untrue, entries, write_repository
from _released_stock import TOKENS, Seen, difference, look, tokens
from families import _ForkedProver
from transformers.utils import logging

import quantflow
from quantflow.errors import QuantflowError
from quantflow.planning.recipe import Export
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "released.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
SCHEMES = ("W4A16", "FP8_DYNAMIC")
OPENED = ("source", "inspect", "plan")
OF_A_SCHEME = ("quantize", "export", "verify", "files", "generate", "stock")
OF_QUANTIZED = ("run", "dequantize", "same", "again")
MADE, REFUSED = "made", "refused"
COLUMNS = (
    *OPENED,
    *(f"{scheme} {step}" for scheme in SCHEMES for step in OF_A_SCHEME),
    *OF_QUANTIZED,
    REFUSED,
)
# of the logits' norm: what 4 and 8 bits cost a tiny random model; another model is off by 1.4
NEAR = {"W4A16": 0.7, "FP8_DYNAMIC": 0.4, "same": 0.7}
# the same weights by another program: sums in another order, and tokens that go to other experts;
# where inputs are rounded too, one between two codes may fall to either; `same` compares a runtime
# that rounds inputs with one that does not
AGREED = {"W4A16": 0.02, "FP8_DYNAMIC": 0.2, "same": 0.4}
# what a program that runs the artifact reads beside the weights, and what its licence asks for
BESIDE = re.compile(
    r"(tokenizer|tekken|tiktoken|spiece|sentencepiece|vocab|merges|special_tokens|added_tokens)"
    r"|(processor|generation)_config|chat_template|LICENSE|NOTICE|(USE|USAGE)_POLICY"
)
SECONDS = 300  # that a repository may take
WORDS = ("--samples", "8", "--sequence-length", "64")  # of the calibration text

Steps = dict[str, str | None]  # step -> None where it passed, or the reason why it did not


def main(words: Sequence[str]) -> int:
    """Run the repositories that were named, or all; return 1 where an artifact is refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="parts of names (default: all)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep what is made here")
    parser.add_argument("--results", type=Path, metavar="FILE", default=HERE / "released.json")
    parser.add_argument("--table", action="store_true", help="run nothing, print what FILE holds")
    parser.add_argument("--write-docs", action="store_true", help="write docs/released.md")
    parser.add_argument("--debug", action="store_true", help="show what the forks print")
    given = parser.parse_args(words)
    chosen = entries(given.only)
    if not chosen:
        parser.error(f"--only {' '.join(given.only)}: no name of released/ contains this")
    there = [given.work / name for name in chosen if given.work and (given.work / name).exists()]
    if there and not given.table:
        parser.error(f"{there[0]}: exists already; delete it, or give another --work")
    rows: dict[str, Steps] = (
        json.loads(given.results.read_text()) if given.results.is_file() else {}
    )
    if not given.table:
        _run_all(chosen, rows, given)
    told = {name: rows[name] for name in chosen if name in rows}
    print(page_text(chosen, told))
    if given.write_docs:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        text = page_text(chosen, told)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return int(any(refused_later(steps) or steps.get(MADE) for steps in told.values()))


def _run_all(
    chosen: Mapping[str, Entry], rows: dict[str, Steps], given: argparse.Namespace
) -> None:
    """Run each repository in a fork, and keep what was found in the file after each."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # threads do not come along into a fork
    for name, entry in chosen.items():
        began = time.monotonic()
        with _folder(given.work, name) as folder:
            try:
                steps = in_fork(partial(_steps, entry, folder), seconds=SECONDS, debug=given.debug)
            except ForkError as error:
                steps = {MADE: str(error)}
        steps = {step: _without(folder, reason) for step, reason in steps.items()}
        failed = [f"{step}: {reason}" for step, reason in steps.items() if reason]
        took = time.monotonic() - began
        print(f"{name:28} {took:5.1f} s  {failed or 'passes'}", file=sys.stderr, flush=True)
        rows[name] = steps
        beside = given.results.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
        beside.replace(given.results)


def _without(folder: Path, reason: str | None) -> str | None:
    """A reason without the folder, which has another name in each run."""
    return reason and reason.replace(f"{folder}/", "").replace(f"file://{folder}", "")


@contextlib.contextmanager
def _folder(work: Path | None, name: str) -> Iterator[Path]:
    """A folder for one repository: a new one below `work`, or one that is deleted afterwards."""
    if work is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        (work / name).mkdir(parents=True)
        yield work / name


def applies(entry: Entry) -> tuple[str, ...]:
    """The steps that a repository has to pass."""
    if refusal(entry):
        return (REFUSED,)
    if "quantized" in entry:
        return ("inspect", *OF_QUANTIZED)
    return (*OPENED, *(f"{scheme} {step}" for scheme in SCHEMES for step in OF_A_SCHEME))


def refusal(entry: Entry) -> dict[str, Any] | None:
    """The words with which a repository has to be refused, and the commands that must say them.

    One that `needs` a module is refused only where that is not installed.
    """
    needs: dict[str, Any] | None = entry.get("needs")
    if needs and find_spec(needs["module"]) is None:
        return needs
    told: dict[str, Any] | None = entry.get("refused")
    return told


def refused_later(steps: Steps) -> list[str]:
    """The steps at which ours refused an artifact that `export` had given out as proved."""
    return [
        f"{scheme} {step}"
        for scheme in SCHEMES
        if steps.get(f"{scheme} export", "") is None
        for step in ("verify", "generate")
        if steps.get(f"{scheme} {step}")
    ]


def _steps(entry: Entry, folder: Path) -> Steps:
    """What became of each step that was reached."""
    model = folder / "model"
    try:
        write_repository(entry, model, plain=folder / "plain")
    except Untrue as error:
        return {MADE: str(error)}
    found: Steps = {MADE: None}
    told = refusal(entry)
    if told:
        return found | {REFUSED: _reason(partial(_refused, told, folder))}
    if "quantized" in entry:
        return found | _of_quantized(folder)
    source: dict[str, Seen] = {}
    found["source"] = _reason(lambda: source.update(seen=_stock(model)))
    found["inspect"] = _reason(partial(_command, "inspect", model))
    found["plan"] = _reason(
        partial(_command, "plan", model, "--for", ",".join(f"{s}" for s in SCHEMES), *WORDS)
    )
    for scheme in SCHEMES:
        found |= _of_scheme(scheme, folder, source.get("seen"), mixture=_is_mixture(entry))
    return found


def _of_scheme(scheme: str, folder: Path, source: Seen | None, *, mixture: bool) -> Steps:
    """The steps of a scheme, up to the first that has no result for the next."""
    model, layers, artifact = folder / "model", folder / f"{scheme}-2", folder / scheme
    more = ("--experts", "rtn") if mixture and scheme.endswith("A16") else ()
    words = ("quantize", model, "-o", layers, "--no-export", "--scheme", scheme, *WORDS, *more)
    found = {f"{scheme} quantize": _reason(partial(_command, *words))}
    if found[f"{scheme} quantize"] is None:
        found[f"{scheme} export"] = _reason(partial(_exported, layers, artifact, model))
    if found.get(f"{scheme} export", "") is not None:
        return found
    found[f"{scheme} verify"] = _reason(partial(_command, "verify", artifact))
    found[f"{scheme} files"] = _reason(partial(_arrived, model, artifact))
    found[f"{scheme} generate"] = _reason(partial(_generated, artifact))
    ours = artifact if found[f"{scheme} generate"] is None else None
    found[f"{scheme} stock"] = _reason(partial(_as_source, artifact, source, scheme, ours=ours))
    return found


def _of_quantized(folder: Path) -> Steps:
    """The steps of a repository that is quantized already."""
    model, plain, opened = folder / "model", folder / "plain", folder / "dequantized"
    found = {
        "inspect": _reason(partial(_command, "inspect", model)),
        "run": _reason(partial(_generated, model)),
        "dequantize": _reason(
            partial(_command, "export", model, "-o", opened, "--format", "dequantized")
        ),
    }
    if found["dequantize"] is None:
        ours = model if found["run"] is None else None
        found["same"] = _reason(lambda: _as_source(opened, _stock(plain), "same", ours=ours))
    words = ("quantize", "--dequantize", model, "-o", folder / "again", "--no-export")
    found["again"] = _reason(partial(_command, *words, "--scheme", "FP8_DYNAMIC"))
    return found


def _is_mixture(entry: Entry) -> bool:
    return "expert" in json.dumps(entry["config"])


def _reason(run: Callable[[], object]) -> str | None:
    try:
        run()
    except QuantflowError as error:
        return f"exit {error.exit_code}: {error.cause} / {error.remedy}"
    except (_Failed, ForkError) as error:
        return str(error)
    except Exception as error:
        return first_line(error)
    return None


class _Failed(Exception):
    """What a step found, in the words of the table."""


def _command(*words: str | Path) -> str:
    """What a command of quantflow prints to stderr, run in this process.

    Raises:
        _Failed: it did not exit 0.
    """
    code, said = _ran(*words)
    if code:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        last = [i for i, line in enumerate(lines) if line.startswith("error: ")] or [-1]
        text = " / ".join(lines[last[-1] :][:2]).removeprefix("error: ")
        raise _Failed(f"exit {code}: {text}")
    return said


def _ran(*words: str | Path) -> tuple[int, str]:
    """Exit code and stderr of a command, run in this process."""
    with tempfile.TemporaryFile("w+") as said:
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            code = exit_code(cli, [str(word) for word in words])
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
        said.seek(0)
        text = said.read()
    sys.stderr.write(text)
    return code, text


def _exported(layers: Path, artifact: Path, model: Path) -> None:
    prover = _ForkedProver()
    quantflow.export(layers, artifact, model=model, options=Export(), prover=prover)


def _arrived(model: Path, artifact: Path) -> None:
    """Look for what lies beside the weights.

    Raises:
        _Failed: a file is not in the artifact.
    """
    names = sorted(str(path.relative_to(model)) for path in model.rglob("*") if path.is_file())
    lost = [
        name
        for name in names
        if BESIDE.search(name) and "original/" not in name
        if not (artifact / name).is_file()
    ]
    if lost:
        raise _Failed(f"not in the artifact: {', '.join(lost)}")


def _generated(artifact: Path) -> None:
    _command("generate", artifact, "--prompt", "def main", "--max-new-tokens", "4", "--quiet")


def _stock(folder: Path) -> Seen:
    """What stock transformers says of a folder.

    Raises:
        _Failed: it does not load it, or its logits are not finite.
    """
    try:
        return look(folder)
    except Exception as error:  # whatever transformers raises, it is a finding
        raise _Failed(f"transformers: {first_line(error)}") from error


def _as_source(artifact: Path, source: Seen | None, kind: str, *, ours: Path | None) -> None:
    """Compare stock transformers on an artifact with the same on its source, and with our runtime.

    Args:
        artifact: what stock transformers loads.
        source: what it says of what the artifact was made from.
        kind: scheme, or `same`: how near they must be.
        ours: what our runtime loads; None where it refuses that, which another step says.

    Raises:
        _Failed: keys, or the answer.
    """
    if source is None:
        raise _Failed("transformers does not load the source")
    seen = _stock(artifact)
    told = difference(seen, source) or _far(seen["logits"], source["logits"], NEAR[kind])
    if told:
        raise _Failed(f"{told} from the source's" if told.startswith("its") else told)
    told = ours and _far(_ours(ours), seen["logits"], AGREED[kind])
    if told:
        raise _Failed(f"{told} from those of our runtime")


def _ours(folder: Path) -> list[list[float]]:
    """The logits of our runtime, which computes as transformers does."""
    loaded = quantflow.load(folder, decoder="auto", exact=True)
    loaded.decoder.begin(rows=1, capacity=TOKENS)
    logits = loaded.decoder.forward(tokens(), last_only=False)
    found: list[list[float]] = logits.reshape(TOKENS, -1).tolist()
    return found


def _far(found: list[list[float]], expected: list[list[float]], most: float) -> str | None:
    """How far logits are from others, where that is more than `most` of the others' norm."""
    ours, theirs = torch.tensor(found), torch.tensor(expected)
    if ours.shape != theirs.shape:
        return f"its logits have another shape, {list(ours.shape)} and {list(theirs.shape)},"
    error = float((ours - theirs).norm() / theirs.norm())
    return None if error <= most else f"its logits are off by {error:.2f} of the norm"


def _refused(refused: Mapping[str, Any], folder: Path) -> None:
    """Ask the commands that must refuse a model; each has to say the sentence.

    Raises:
        _Failed: one of them went on, or says something else.
    """
    model = folder / "model"
    commands: dict[str, tuple[str | Path, ...]] = {
        "plan": ("plan", model, "--for", "W4A16"),
        **{
            scheme: ("quantize", model, "-o", folder / scheme, "--scheme", scheme, *WORDS)
            for scheme in SCHEMES
        },
        "generate": ("generate", model, "--prompt", "def main", "--max-new-tokens", "4"),
        "dequantize": ("export", model, "-o", folder / "dequantized", "--format", "dequantized"),
    }
    for by in refused.get("by", [name for name in commands if name != "dequantize"]):
        code, said = _ran(*commands[by])
        if code == 0:
            raise _Failed(f"{by} does not refuse it")
        if not re.search(refused["says"], said):
            raise _Failed(f"{by}: exit {code}: {' / '.join(said.splitlines()[-2:])}")


def page_text(chosen: Mapping[str, Entry], rows: Mapping[str, Steps]) -> str:
    """The results as Markdown: the share of each step, a row per repository, the reasons."""
    notes: list[str] = []
    lines = [
        f"| repository | {' | '.join((*OPENED, *OF_A_SCHEME, *OF_QUANTIZED, REFUSED))} |",
        "|---|" + "---|" * (len(OPENED) + len(OF_A_SCHEME) + len(OF_QUANTIZED) + 1),
    ]
    for name, steps in rows.items():
        told = _cells(chosen[name], steps, notes)
        lines.append(f"| {chosen[name]['repository']} | {' | '.join(told)} |")
    families = {chosen[name]["family"] for name in rows}
    whole = [not any(_outcome(chosen[n], s, rows[n]) for s in applies(chosen[n])) for n in rows]
    unknown = sum("not_looked_up" in chosen[name] for name in rows)
    shares = [
        f"{len(rows)} repositories of {len(families)} families; {_share(whole)} pass every step. "
        f"{unknown} entries name something that could not be looked up.",
        "",
        *(f"- {step}: {_share(found)}" for step, found in _by_step(chosen, rows)),
    ]
    reasons = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*shares, "", *lines, "", *reasons]).strip()


def _by_step(
    chosen: Mapping[str, Entry], rows: Mapping[str, Steps]
) -> Iterator[tuple[str, list[bool]]]:
    """Each step with whether each repository that has to pass it did."""
    for step in COLUMNS:
        found = [
            _outcome(chosen[name], step, steps) is None
            for name, steps in rows.items()
            if step in applies(chosen[name])
        ]
        if found:
            yield step, found


def _share(passed: Sequence[bool]) -> str:
    return f"{sum(passed)} of {len(passed)} ({sum(passed) / max(1, len(passed)):.0%})"


def _outcome(entry: Entry, step: str, steps: Steps) -> str | None:
    """None where a step passed, the reason where it failed, `not reached` where it never ran."""
    del entry
    if steps.get(MADE):
        return steps[MADE]
    return steps.get(step, "not reached")


def _cells(entry: Entry, steps: Steps, notes: list[str]) -> list[str]:
    """A cell per column; both schemes share the columns of theirs, W4A16 before FP8_DYNAMIC."""
    own = applies(entry)
    cells = []
    for column in (*OPENED, *OF_A_SCHEME, *OF_QUANTIZED, REFUSED):
        both = [f"{scheme} {column}" for scheme in SCHEMES if f"{scheme} {column}" in own]
        names = both or ([column] if column in own else [])
        told = [_cell(entry, name, steps, notes) for name in names]
        cells.append(told[0] if len(set(told)) == 1 else ", ".join(told))
    return cells


def _cell(entry: Entry, step: str, steps: Steps, notes: list[str]) -> str:
    reason = _outcome(entry, step, steps)
    if reason is None:
        return "yes"
    if reason == "not reached":
        return "-"
    note = f"{entry['repository']}: {reason}"
    if note not in notes:
        notes.append(note)
    return f"no ({notes.index(note) + 1})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
