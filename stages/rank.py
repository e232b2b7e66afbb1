"""One of several processes of a stage, as torchrun starts it: `python -m quantflow.stages.rank FOLDER`.

Reads    the job in FOLDER, which `quantflow.distributed.launch.launch` wrote
Writes   what the stage writes; what rank 0 generates goes to stdout as it comes, its result into FOLDER
Resumes  as the stage
Fails    as the stage; the process that started the ranks passes on the sentence and the code
"""

import sys
from pathlib import Path

from quantflow.distributed.launch import JOB
from quantflow.files.canonical import read_json
from quantflow.stages.cli.output import end_failed_rank, exit_code_of
from quantflow.stages.cli.progress_line import ProgressLine
from quantflow.stages.cli.signals import Signals


def main(folder: str) -> int:
    """Do this rank's part of the job in a folder and return the exit code."""
    signals = Signals()

    def work() -> None:
        from quantflow import api, process_memory

        process_memory.give_back_freed()
        process_memory.take_huge_pages()
        patience = read_json(Path(folder) / JOB)["patience"]
        progress = ProgressLine(patience=patience, bars=False, signals=signals)
        with signals.installed():
            api.run_rank(folder, progress=progress, stream=_write)

    code = exit_code_of(work)
    end_failed_rank(code)
    return code


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
