"""Tests of the number of threads, and of how long they wait for each other."""

import os
import subprocess
import sys

import pytest
import torch

from quantflow import control_group, cpu_threads
from tests.shared import run

WRITING = ("measure", "quantize")  # verbs that need -o

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Leave torch and the module as they were."""
    monkeypatch.setattr(cpu_threads, "_given", None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("quota", "cores"), [(0.2, 1), (1.0, 1), (None, CORES), (1000, CORES)])
def test_a_quota_bounds_the_cores(monkeypatch, quota, cores):
    monkeypatch.setattr(control_group, "cpu_quota", lambda: quota)
    assert cpu_threads.usable_cores() == cores


@pytest.mark.parametrize(
    ("visible", "quota", "cores"),
    [(8, 1.5, 2), (8, 4.0, 4), (12, 4.0, 4), (96, 7.65, 8), (4, None, 4)],
)
def test_a_container_has_the_cores_of_its_quota_and_a_part_of_one_counts(
    monkeypatch, visible, quota, cores
):
    """Quotas on hosts of more cores, and a set of cores without a quota.

    Reported in ollama/ollama#17916, springfall2008/batpred#4771 and tobocop2/lilbee#660.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(visible)), raising=False)
    monkeypatch.setattr(control_group, "cpu_quota", lambda: quota)
    assert cpu_threads.usable_cores() == cores


def test_torch_is_told_of_a_quota_alone(monkeypatch):
    torch.set_num_threads(3)
    monkeypatch.setattr(control_group, "cpu_quota", lambda: 1.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the user's word
    assert cpu_threads.tell_torch() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert cpu_threads.tell_torch() == 1 == torch.get_num_threads()


def test_a_smaller_number_of_the_caller_stays(monkeypatch):
    monkeypatch.setattr(control_group, "cpu_quota", lambda: None)
    torch.set_num_threads(1)
    assert cpu_threads.tell_torch() == 1


def test_a_given_number_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cpu_threads.take(3)
    assert (cpu_threads.usable_cores(), cpu_threads.tell_torch()) == (3, 3)


@pytest.mark.parametrize("verb", ["generate", "serve", "chat", "bench", "measure", "quantize"])
def test_verbs_that_compute_take_a_number(verb, tmp_path, capsys):
    words = (verb, tmp_path / "none", *(("-o", tmp_path / "o") if verb in WRITING else ()))
    assert run(*words, "--threads", "0") == 2
    assert "--threads" in capsys.readouterr().err
    run(*words, "--threads", "3")
    assert cpu_threads.usable_cores() == 3


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, cpu_threads.READS),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_threads_sleep_soon_where_the_environment_says_nothing(given, found):
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    script = (
        "import quantflow, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [found, "False"]  # torch reads the environment when it comes
