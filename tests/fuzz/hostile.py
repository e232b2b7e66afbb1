"""Artifacts of hostile parts, whose every hash is right again.

Every value of their JSON files is changed, and tensors get other shapes.

    python tests/fuzz/hostile.py MODEL --changes 10 --seed 0 [--seconds S] [--most N]
                                       [--files config.json,...] [--verbs generate,...]

makes an artifact of a small model, changes one value at a time (of all, or of N in each file), each
so often, and runs the verbs on every one; on the model and on what quantize left, those that read
these. A change that makes the bytes of an earlier one is counted and not tried again. The verbs of
an artifact share a fork of this process, with 2 GiB, and 10 s for each; what goes wrong there is
tried again in a fork of its own. A verb may refuse (exit 2, 3, 5, 6, 7; validate also 4) with a
sentence, or give the text that transformers gives of the same folder. Whatever else happens is
printed with the number that makes it again; exit 1.
"""

import argparse
import gc
import hashlib
import json
import math
import os
import random
import re
import resource
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import asgi
import mutations
import torch
from isolated import SECONDS, Outcome, isolated
from safetensors.torch import load_file, save

from quantflow.core.parallel import Workers
from quantflow.errors import QuantflowError
from quantflow.exporting import export as export_stage
from quantflow.exporting import proof_process
from quantflow.files.canonical import digest_of, readable_json
from quantflow.files.ledger import Ledger
from quantflow.files.manifest import build_manifest, write_manifest
from quantflow.files.safetensors_header import read_header
from quantflow.files.stage_folder import DONE
from quantflow.server import process
from quantflow.server.app import application
from quantflow.server.models import Models, open_model
from quantflow.server.settings import ServeJob
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

SOURCE = "model/config.json"  # of the model, which is measured and quantized
FILES = (
    SOURCE,
    "config.json",
    "quantflow.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "tensors",
    "quantized/quantize.json",  # of what quantize left, which is exported
    "quantized/DONE.json",
    "quantized/layers/00000.json",
)
QUANTIZED = "quantized/"
FROM_SOURCE, FROM_QUANTIZED = ("measure", "quantize"), ("export",)
VERBS = ("verify", "inspect", "generate", "serve", "bench", "validate")
PROMPT, TOKENS = "w10 w27 w5", 6
NOT_FOR_TEXT = frozenset({*FROM_SOURCE, *FROM_QUANTIZED, "verify", "inspect", "bench", "validate"})
OURS = frozenset({"quantflow.json", "README.md"})  # transformers reads neither
END = f"<{secrets.token_hex(16)} ended with "  # after what a verb says; no artifact can know it


@dataclass(frozen=True, kw_only=True)
class Made:
    """What is attacked.

    Attributes:
        artifact: intact.
        quantized: what it was exported from.
        model: what that was made from.
        text: that it is validated on.
        answer: what it says when it is intact.
    """

    artifact: Path
    quantized: Path
    model: Path
    text: Path
    answer: str = ""


@contextmanager
def made_from(model: Path, *, exported: bool) -> Iterator[Made]:
    """Yield a model, and an artifact of it in 8 bits where `exported`."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        work = Path(name)
        export_stage.proving = lambda: nullcontext(ProverHere())
        for line in (
            ()
            if not exported
            else (
                [
                    "quantize",
                    str(model),
                    "-o",
                    str(work / "2"),
                    "--scheme",
                    "W8A16",
                    "--algorithm",
                    "rtn",
                    "--no-export",
                    "-q",
                ],
                ["export", str(work / "2"), "-o", str(work / "artifact"), "-q"],
            )
        ):
            if exit_code(cli, line) != 0:
                raise SystemExit(f"{model}: no artifact can be made of it")
        text = work / "text.jsonl"
        chance = random.Random(0)
        text.write_text(
            "".join(
                json.dumps({"input_ids": [chance.randrange(3, 32) for _ in range(32)]}) + "\n"
                for _ in range(8)
            )
        )
        yield Made(artifact=work / "artifact", quantized=work / "2", model=model, text=text)


class ProverHere:
    """Proves an export in this process: what it raises is seen, and no other is started."""

    def expect(self, kind: str) -> None:
        """Do nothing: all is imported."""

    def prove(
        self, artifact: Path, quantized: Path, source: Path, *, workers: int, measures: bool
    ) -> dict[str, Any]:
        """Prove it, with one worker."""
        del workers
        with Workers(1) as pool, torch.no_grad():
            return proof_process.prove(artifact, quantized, source, workers=pool, measures=measures)


def places(made: Made, file: str) -> list[tuple[Any, ...]]:
    """Return what of a file can be changed: paths of values, or names of tensors."""
    if file == "tensors":
        return [(name,) for name in sorted(load_file(made.artifact / "model.safetensors"))]
    return [
        place
        for place in mutations.places(json.loads((intact(made, file) / inside(file)).read_text()))
        if place
    ]


def intact(made: Made, file: str) -> Path:
    """Return the folder that a file is changed in a copy of."""
    return (
        made.model
        if file == SOURCE
        else made.quantized
        if file.startswith(QUANTIZED)
        else made.artifact
    )


def inside(file: str) -> str:
    """Return the name of a file in that folder."""
    return {SOURCE: "config.json", "tensors": "model.safetensors"}.get(
        file, file.removeprefix(QUANTIZED)
    )


def verbs_of(file: str, verbs: Sequence[str]) -> Sequence[str]:
    """The verbs that read that folder.

    Of the verbs for artifacts it is those that are asked for.
    """
    return (
        FROM_SOURCE if file == SOURCE else FROM_QUANTIZED if file.startswith(QUANTIZED) else verbs
    )


def changed(chance: random.Random, made: Made, file: str, place: Sequence[Any]) -> bytes:
    """Return the content of a file with one value changed."""
    if file == "tensors":
        tensors = load_file(made.artifact / "model.safetensors")
        tensors[place[0]] = reshaped(chance, tensors[place[0]]).contiguous().clone()
        return save(tensors, metadata={"format": "pt"})
    value = json.loads((intact(made, file) / inside(file)).read_text())
    mutations.change_(chance, value, place)
    return mutations.as_json(value)


def change(folder: Path, file: str, content: bytes) -> None:
    """Write the changed file of an artifact, a model or a quantized folder.

    The hashes are made right again.
    """
    if file == "quantflow.json":
        reseal_manifest(folder / file, json.loads(content))
        return
    (folder / inside(file)).write_bytes(content)
    if file.startswith(QUANTIZED) and inside(file) != DONE:
        record = json.loads((folder / DONE).read_text())
        record["files"][inside(file)] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
        }
        (folder / DONE).write_text(json.dumps(record))
    elif folder.joinpath("quantflow.json").exists():
        reseal(folder)


def reshaped(chance: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of another shape, size, dtype or content."""
    rows = max(1, tensor.shape[0] // 2) if tensor.ndim else 1
    found: list[Callable[[], torch.Tensor]] = [
        lambda: tensor.flatten()[:1],
        lambda: tensor.flatten(),
        lambda: tensor[:0] if tensor.ndim else tensor,
        lambda: tensor[None],
        lambda: tensor[..., None],
        lambda: tensor[:rows] if tensor.ndim else tensor,
        lambda: tensor.repeat(2, *[1] * (tensor.ndim - 1)) if tensor.ndim else tensor[None],
        lambda: tensor.transpose(0, -1) if tensor.ndim else tensor,
        lambda: tensor[..., : max(1, tensor.shape[-1] // 2)] if tensor.ndim else tensor,
        lambda: torch.cat([tensor, tensor], -1) if tensor.ndim else tensor[None],
        lambda: torch.full_like(tensor, -1),
        lambda: torch.zeros_like(tensor),
        lambda: tensor.to(torch.int32),
        lambda: tensor.to(torch.float64),
        lambda: tensor.to(torch.bool),
        lambda: tensor.to(torch.uint8),
        lambda: tensor.float() * float("nan"),
        lambda: tensor.float() * float("inf"),
        lambda: (tensor.float() * 3e38).to(tensor.dtype) if tensor.is_floating_point() else tensor,
        lambda: torch.randint(
            -128, 127, tensor.shape, generator=torch.Generator().manual_seed(chance.randrange(99))
        ).to(tensor.dtype),
    ]
    return chance.choice(found)()


def reseal(folder: Path) -> None:
    """Make every hash of an artifact right again.

    That includes the ledger's of tensors that were copied.
    """
    body = json.loads((folder / "quantflow.json").read_text())
    headers = read_header(folder / "model.safetensors")[0]
    ledger, entries = Ledger.from_json(body["ledger"]), []
    for entry in ledger.tensors:
        info = headers.get(entry.name)
        known = entry.action != "copied" or info is None
        entries.append(
            entry
            if known
            else replace(entry, dtype=info.dtype, shape=info.shape, nbytes=info.nbytes)
        )
    body["ledger"] = replace(ledger, tensors=tuple(entries)).to_json()
    for key in ("digest", "files", "layout_version"):
        body.pop(key)
    write_manifest(folder, build_manifest(folder, body=body))


def reseal_manifest(path: Path, value: dict[str, Any]) -> None:
    """Write a manifest whose digest is right whatever it says."""
    value.pop("digest", None)
    try:
        path.write_bytes(readable_json({**value, "digest": digest_of(value)}))
    except QuantflowError:  # no JSON of ours: a lone surrogate, a number that is not finite
        path.write_bytes(json.dumps({**value, "digest": "0" * 64}).encode())


def verb(name: str, folder: Path, made: Made) -> int:
    """Run a verb on an artifact in this process; return its exit code."""
    if name == "serve":
        return served(folder)
    if name == "transformers":
        print(f"\n{json.dumps(text_of_transformers(folder))}")
        return 0
    ids = ["--calibration", made.text, "--samples", 2, "--sequence-length", 8, "-q"]
    lines: dict[str, list[Any]] = {
        "measure": [folder, "-o", folder.with_name("measured"), *ids],
        "quantize": [folder, "-o", folder.with_name("quantized"), "--scheme", "W8A8", *ids],
        "export": [folder, "-o", folder.with_name("exported"), "--model", made.model, "-q"],
        "verify": [folder],
        "inspect": [folder],
        "generate": [folder, "--prompt", PROMPT, "--max-new-tokens", TOKENS, "--json", "-q"],
        "bench": [
            folder,
            "--input-tokens",
            4,
            "--new-tokens",
            2,
            "--runs",
            1,
            "--warmups",
            0,
            "-q",
        ],
        "validate": [folder, "--baseline", made.model, "--text", made.text, "--tokens", 256, "-q"],
    }
    report = ["--report", folder.with_name("report")] if name == "validate" else []
    return exit_code(cli, [name, *map(str, lines[name] + report)])


def served(folder: Path) -> int:
    """Start a server's application on an artifact and ask it; an exit code as the verb's."""
    job = ServeJob(artifact=folder, port=0)
    try:
        models = Models(job, open_model(folder, job))
        app = application(process.site_of(job, models))
        parameters = {"max_new_tokens": TOKENS, "do_sample": False, "return_full_text": False}
        status, body = asgi.asked(
            app,
            "POST",
            "/generate",
            json.dumps({"inputs": PROMPT, "parameters": parameters}).encode(),
        )
        models.close()
    except QuantflowError as error:
        print(f"error: {error.cause}", file=sys.stderr)
        return error.exit_code
    answer = json.loads(body)
    if status >= 500 or (status != 200 and "error" not in answer):
        raise AssertionError(f"status {status}: {body[:200]!r}")
    if status != 200:
        print(answer["error"], file=sys.stderr)
        return 3
    print(json.dumps(answer["generated_text"]))
    return 0


def text_of_transformers(folder: Path) -> str:
    """Return what transformers, with compressed-tensors, makes of an artifact."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False, num_beams=1)
    whole, prompt = (
        tokenizer.decode(row, skip_special_tokens=True) for row in (out[0], ids["input_ids"][0])
    )
    return str(whole.removeprefix(prompt))


def text_in(outcome: Outcome, name: str) -> str | None:
    """Return the text that a verb gave; None where there is none."""
    said = outcome.said.strip()
    try:
        if name == "generate":
            return str(json.loads(said[said.index("{") :])["outputs"][0]["text"])
        return str(
            json.loads(next(line for line in reversed(said.splitlines()) if line.startswith('"')))
        )
    except (ValueError, IndexError, KeyError, StopIteration):
        return None


def why(outcome: Outcome) -> str:
    """Return one line of what went wrong."""
    lines = [line for line in outcome.said.splitlines() if line.strip()]
    told = (
        [line for line in lines if "Error" in line or "error:" in line or "panicked" in line]
        or lines
        or ["nothing was said"]
    )
    return f"{outcome.code}: {told[-1][:150]}"


def each(names: Sequence[str], folder: Path, made: Made) -> int:
    """Run verbs one after the other in this process, each with its own seconds.

    After each its outcome is reported.
    """
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for name in names:
        resource.setrlimit(
            resource.RLIMIT_CPU, (min(most, math.ceil(time.process_time() + SECONDS)), most)
        )
        try:
            code = verb(name, folder, made)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        print(f"{END}{code}>", flush=True)
    return 0


def outcomes(names: Sequence[str], folder: Path, made: Made) -> Iterator[tuple[str, Outcome]]:
    """Yield how each verb ends: all in one fork, those after one that ended it in another."""
    left = list(names)
    while left:
        whole = isolated(lambda: each(left, folder, made), seconds=SECONDS * len(left))
        *said, rest = re.split(rf"{END}(-?\d+)>\n", whole.said)
        for text, code in zip(said[::2], said[1::2], strict=True):
            yield left.pop(0), replace(whole, code=int(code), said=text)
        if left:
            yield left.pop(0), replace(whole, said=rest)
        elif whole.code != 0:
            yield names[-1], replace(whole, said=rest)


def allowed(name: str, outcome: Outcome) -> bool:
    """Return whether a verb may end so."""
    return outcome.kept or (
        name == "validate" and outcome.code == 4 and "Traceback" not in outcome.said
    )


def reference(folder: Path, made: Made, known: dict[bytes, Outcome]) -> Outcome:
    """The outcome of transformers with a folder.

    `known` keeps that of every content of the files that it reads.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name not in OURS:
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    if digest.digest() not in known:
        known[digest.digest()] = isolated(lambda: verb("transformers", folder, made), seconds=30)
    return known[digest.digest()]


def attacked(
    made: Made,
    file: str,
    content: bytes,
    *,
    verbs: Sequence[str],
    ends: Counter[str],
    known: dict[bytes, Outcome],
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong: a verb, and what it did; count how verbs end in `ends`."""
    with tempfile.TemporaryDirectory(dir=made.artifact.parent) as name:
        folder = Path(shutil.copytree(intact(made, file), Path(name) / "a"))
        change(folder, file, content)
        texts: dict[str, str | None] = {}
        for one, outcome in outcomes(verbs_of(file, verbs), folder, made):
            ends[f"{one} {outcome.code}"] += 1
            if not allowed(one, outcome):
                alone = isolated(lambda one=one: verb(one, folder, made))
                yield (
                    one,
                    why(outcome)
                    + (" (not in a process of its own)" if allowed(one, alone) else ""),
                )
            elif outcome.code == 0 and one not in NOT_FOR_TEXT:
                texts[one] = text_in(outcome, one)
        if texts:
            outcome = reference(folder, made, known)
            expected = text_in(outcome, "transformers") if outcome.code == 0 else None
            for one, text in texts.items():
                if outcome.code != 0 and text == made.answer:
                    ends[f"{one} of a value that transformers refuses and nothing here reads"] += 1
                elif outcome.code != 0:
                    yield one, f"gives {text!r}, transformers refuses: {why(outcome)}"
                elif text != expected:
                    yield one, f"gives {text!r}, transformers {expected!r}"


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--changes", type=int, default=10, help="of each value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="of all; an artifact that was begun is finished"
    )
    parser.add_argument(
        "--most", type=int, help="values of each file, drawn by the seed (default: all)"
    )
    parser.add_argument("--files", default=",".join(FILES))
    parser.add_argument("--verbs", default=",".join(VERBS))
    parser.add_argument("--place", help="one path, as it is printed")
    parser.add_argument("--number", type=int, help="one change of it, as it is printed")
    options = parser.parse_args()
    end, wrong = time.monotonic() + options.seconds, Counter[str]()
    files = options.files.split(",")
    exported = files != [SOURCE]
    with made_from(options.model, exported=exported) as made:
        if exported:
            reseal(made.artifact)
        elif (
            outcome := isolated(
                lambda: verb(
                    "quantize", shutil.copytree(made.model, made.text.with_name("m")), made
                )
            )
        ).code != 0:
            raise SystemExit(f"{options.model}: {outcome.said}")
        for verb_name in (
            (*VERBS, "export", "transformers") if exported else ()
        ):  # everything is imported before anything is changed
            if (
                code := verb(
                    verb_name, made.quantized if verb_name == "export" else made.artifact, made
                )
            ) not in (0, 4):
                raise SystemExit(f"{verb_name}: the intact artifact ends with {code}")
        if exported:
            made = replace(
                made,
                answer=text_in(isolated(lambda: verb("generate", made.artifact, made)), "generate")
                or "",
            )
        gc.collect()
        gc.freeze()  # a fork that collects garbage does not copy what it finds here
        known: dict[bytes, Outcome] = {}
        for file in files:
            begin, changes, before, ends, tried = (
                time.monotonic(),
                0,
                sum(wrong.values()),
                Counter[str](),
                set[bytes](),
            )
            found = [
                place for place in places(made, file) if options.place in (None, json.dumps(place))
            ]
            if options.most is not None and len(found) > options.most:
                found = random.Random(f"{options.seed} {file}").sample(found, options.most)
            numbers = range(options.changes) if options.number is None else [options.number]
            for number in numbers:
                for place in found:
                    if time.monotonic() > end:
                        break
                    changes += 1
                    content = changed(
                        random.Random(f"{options.seed} {file} {place} {number}"), made, file, place
                    )
                    digest = hashlib.sha256(content).digest()
                    if digest in tried:
                        continue
                    tried.add(digest)
                    for name, said in attacked(
                        made, file, content, verbs=options.verbs.split(","), ends=ends, known=known
                    ):
                        wrong[f"{name}: {said}"] += 1
                        if wrong[f"{name}: {said}"] <= 3:
                            print(
                                f"  {file} {json.dumps(place)} {number}: {name} {said}", flush=True
                            )
            print(
                f"{file}\t{len(found)} values\t{changes} changes\t{len(tried)} "
                f"artifacts\t{time.monotonic() - begin:.0f} s"
                f"\t{sum(wrong.values()) - before} findings",
                flush=True,
            )
            print("  " + ", ".join(f"{name}: {ends[name]}" for name in sorted(ends)), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(2)
