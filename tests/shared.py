"""Helpers that many files of tests use.

The command line in this process, random tensors, and cases of which some are slow tests.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code


def run(*arguments: object) -> int:
    """Exit code of a command line that runs in this process."""
    return exit_code(cli, [str(argument) for argument in arguments])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values of a shape, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def open_in(folder: Path) -> list[str]:
    """Names that this process holds open in a folder; those that it has elsewhere may come and go.

    A file that was removed counts: its name has " (deleted)" at the end.
    """
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the listing's own, or another thread's
            continue
        if Path(name).is_relative_to(folder):
            found.append(name)
    return found


def compiler_with(folder, option):
    """A program that runs gcc with one option more, the last: of several -march it counts."""
    compiler = folder / "gcc"
    compiler.write_text(f'#!/bin/sh\nexec gcc "$@" {option}\n')
    compiler.chmod(0o700)
    return str(compiler)


def slow_but(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Cases of a parametrized test: `kept` run by default, the others are slow tests."""
    found = list(cases)
    assert all(case in found for case in kept), f"{kept}: not among the cases"
    return [case if case in kept else slow(case) for case in found]


def slow(case: Any) -> Any:
    """A case of a parametrized test, one value or a tuple of several, as a slow test."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
