"""Joules by counters that begin anew at their own maximum."""

import pytest

from quantflow.benching.energy import package_joules


@pytest.fixture
def counters(tmp_path):
    """Return what sets a counter, of two processors, a part of the first and what is none."""

    def put(**values):
        for name, value in values.items():
            folder = (
                tmp_path
                / {"first": "intel-rapl:0", "part": "intel-rapl:0:0", "second": "intel-rapl:1"}[
                    name
                ]
            )
            folder.mkdir(exist_ok=True)
            (folder / "energy_uj").write_text(f"{value}\n")
            (folder / "max_energy_range_uj").write_text("10000000\n")

    (tmp_path / "dtpm").mkdir()
    return put


def test_processors_are_added_and_their_parts_are_not(counters, tmp_path):
    counters(first=1_000_000, part=0, second=5_000_000)
    before = package_joules(tmp_path)
    counters(first=1_500_000, part=9_000_000, second=8_000_000)
    assert before.since() == 3.5


def test_a_counter_that_began_anew_has_gone_through_its_maximum(counters, tmp_path):
    counters(first=9_000_000)
    before = package_joules(tmp_path)
    counters(first=500_000)
    assert before.since() == 1.5


def test_what_cannot_be_read_is_not_known(counters, tmp_path):
    assert package_joules(tmp_path) is None
    counters(first=1, second=1)
    before = package_joules(tmp_path)
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("")
    assert before.since() is None and package_joules(tmp_path) is None
