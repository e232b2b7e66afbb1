"""The lines of measure about its text: a text that is too short, and the total at the end."""

import pytest

from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.record import read_measurement
from quantflow.planning.recipe import Calibration, Measure
from quantflow.progress import Silent


class Heard(Silent):
    """Progress that keeps what it is told."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


@pytest.mark.parametrize(("pack", "warned"), [(True, False), (False, True)])
def test_less_than_half_of_the_tokens_is_said_with_the_remedy(llama, tmp_path, pack, warned):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(["value scale round group layer token"] * 40))
    calibration = Calibration(source=str(text), samples=4, sequence_length=64, pack=pack)
    heard = Heard()
    measure.run(
        MeasureJob(
            model=llama,
            output=tmp_path / "m",
            calibration=calibration,
            options=Measure(stats=("amax",)),
        ),
        heard,
    )
    short = [line for line in heard.lines if "tokens asked for" in line]
    assert bool(short) == warned
    assert not warned or (
        "of the 256 tokens asked for (4 of 4 sequences, the shortest" in short[0]
        and "--pack" in short[0]
    )
    sequences = "in 4 sequences, 2 layers, amax; "
    assert (
        sequences in heard.lines[-1]
        and heard.lines[-1].startswith("measure: ")
        and heard.lines[-1].endswith(" s")
    )
    assert ("256 tokens" in heard.lines[-1]) == (not warned)


def test_lines_that_are_left_out_are_said_and_stand_in_the_measurement(llama, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "value scale round group"}\n' * 3 + '{"text": 1}\n')
    calibration = Calibration(source=str(text), samples=3, sequence_length=4)
    heard = Heard()
    options = Measure(stats=("amax",))
    job = MeasureJob(model=llama, output=tmp_path, calibration=calibration, options=options)
    measure.run(job, heard)
    note = "measure: 1 of 4 lines cannot be read and are left out, the first is "
    assert [line for line in heard.lines if line.startswith(note)]
    measured = read_measurement(rank_folder(tmp_path, 0, 1))
    assert measured.meta["calibration"]["left_out"] == 1
