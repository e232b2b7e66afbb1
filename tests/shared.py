"""Helpers that many files of tests use: the command line in this process, and random tensors."""

import torch

from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code


def run(*arguments: object) -> int:
    """Exit code of a command line that runs in this process."""
    return exit_code(cli, [str(argument) for argument in arguments])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values of a shape, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compiler_with(folder, option):
    """A program that runs gcc with one option more, the last: of several -march it counts."""
    compiler = folder / "gcc"
    compiler.write_text(f'#!/bin/sh\nexec gcc "$@" {option}\n')
    compiler.chmod(0o700)
    return str(compiler)
