"""The seconds of `validate` beside two plain forwards of transformers over the same windows.

One forward is in bfloat16 and one in float32.

python benchmarks/validate.py MODEL --text FILE --tokens 16000        README.md says what is run
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from _quantflow import QUANTFLOW, Commands
from _report import Bar, bars, machine, table
from _watch import Failed, Run, need_tools, run

MOST = 1.3  # times the two forwards
DTYPES = ("bfloat16", "float32")
ANY = (
    "schemes: [W4A16]\n"
    "thresholds: {ppl_ratio: 1000000, mean_kld: 1000000, kld_p999: 1000000, top1_agreement: 0}\n"
)
ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str]) -> int:
    """Run every program, a process each, and print their seconds.

    The exit code is 1 where the bar is missed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--tokens", type=int, default=16000, help="default 16000")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window (default 512)")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "artifacts" / "validate", help="where everything goes"
    )
    given = parser.parse_args(arguments)
    model, work = given.model.resolve(), given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        need_tools()
        found = _programs(model, given.text.resolve(), given.tokens, given.length, work)
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    both = [
        sum(found[dtype].seconds for dtype in DTYPES),
        sum(found[dtype].cpu for dtype in DTYPES),
    ]
    rows, judged = [], []
    for name, took in found.items():
        times = [took.seconds / both[0], took.cpu / both[1]]
        rows.append(
            (name, f"{took.seconds:.1f}", f"{took.cpu:.1f}", *(f"{time:.2f}x" for time in times))
        )
        if name not in DTYPES:
            judged.append(
                Bar(
                    what=f"{name}: seconds",
                    promised=f"{MOST}x",
                    found=f"{times[0]:.2f}x",
                    met=times[0] <= MOST,
                )
            )
    print(
        table(("program", "seconds", "CPU seconds", "of both forwards", "CPU of both"), rows)
        + "\n\n"
        + bars(judged)
    )
    print(f"\nload average at the end {machine(work)['load']:.1f}")
    return 0 if all(bar.met for bar in judged) else 1


def _programs(model: Path, text: Path, tokens: int, length: int, work: Path) -> dict[str, Run]:
    """Seconds of the forwards, of the first validation of the model and text, and of the next."""
    for name in ("2", "4", "r1", "r2", "validation-cache"):
        shutil.rmtree(work / name, ignore_errors=True)
    log = work / "log"
    run(
        Commands(model=model).quantize(
            work / "2", scheme="W4A16", algorithm="rtn", artifact=work / "4"
        ),
        log=log,
    )
    words = ("--text", text, "--tokens", str(tokens), "--length", str(length))
    inside = {"PYTHONPATH": str(ROOT)}
    found = {
        dtype: run(
            (sys.executable, __file__, model, *words, "--forward", dtype),
            log=log,
            environment=inside,
        )
        for dtype in DTYPES
    }
    (work / "any.yaml").write_text(ANY)
    about = (
        "--baseline",
        model,
        "--text",
        text,
        "--tokens",
        str(tokens),
        "--sequence-length",
        str(length),
    )
    for name, report in (("validate, the first of the model", "r1"), ("validate, the next", "r2")):
        found[name] = run(
            (
                *QUANTFLOW,
                "validate",
                work / "4",
                *about,
                "--gate",
                work / "any.yaml",
                "--report",
                work / report,
            ),
            log=log,
        )
    return found


def forward(arguments: Sequence[str]) -> None:
    """Run the model of transformers over the windows, as a program of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--forward", choices=DTYPES)
    given = parser.parse_args(arguments)

    import torch
    from transformers import AutoModelForCausalLM

    from quantflow.measuring.text import read_documents
    from quantflow.models.tokenizer import load_tokenizer
    from quantflow.validating.windows import evaluation_sequences

    documents = read_documents(given.text, load_tokenizer(given.model))
    windows = evaluation_sequences(documents, tokens=given.tokens, sequence_length=given.length)
    model = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=getattr(torch, given.forward)
    ).eval()
    with torch.inference_mode():
        for window in windows:
            model(input_ids=window[None], use_cache=False)


if __name__ == "__main__":
    if "--forward" in sys.argv:
        forward(sys.argv[1:])
    else:
        sys.exit(main(sys.argv[1:]))
