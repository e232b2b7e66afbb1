"""One of several processes of a job: `python -m quantflow.distributed.rank FOLDER`.

Reads    the job in FOLDER, which `quantflow.distributed.launch.launch` wrote
Writes   what the job writes; what rank 0 generates goes to stdout as it comes, its result to FOLDER
Resumes  as the job
Fails    as the job; the process that started the ranks passes on the sentence and the code
"""

import json
import sys
from pathlib import Path

from quantflow import process_memory
from quantflow.distributed.job_file import decode
from quantflow.distributed.launch import JOB, RESULT, is_rank, launched_rank
from quantflow.files.canonical import read_json
from quantflow.progress import Progress
from quantflow.reporting.failures import end_at_once, exit_code_of
from quantflow.reporting.progress_line import ProgressLine
from quantflow.reporting.signals import Signals


def main(folder: str) -> int:
    """Do this rank's part of the job in a folder and return the exit code."""
    signals = Signals()

    def work() -> None:
        process_memory.give_back_freed()
        process_memory.take_huge_pages()
        patience = read_json(Path(folder) / JOB)["patience"]
        with signals.installed():
            run(Path(folder), ProgressLine(patience=patience, bars=False, signals=signals))

    code = exit_code_of(work)
    end_failed_rank(code)
    return code


def run(folder: Path, progress: Progress) -> None:
    """Do this rank's part of the job in a folder; the first rank writes the result beside the job.

    Raises:
        QuantflowError: see the job's own `run`.
    """
    job = decode(read_json(folder / JOB)["job"])
    result = job.run(progress, **({"stream": _write} if getattr(job, "STREAMS", False) else {}))
    rank = launched_rank()
    if isinstance(result, dict) and rank is not None and rank[0] == 0:
        (folder / RESULT).write_text(json.dumps(result))


def end_failed_rank(code: int) -> None:
    """End this process at once with its exit code where it is a rank that failed; else return."""
    if is_rank():
        end_at_once(code)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
