"""The effects of process_memory: each test has a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _told(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


@pytest.mark.slow
def test_cycles_are_searched_for_as_usual_again_once_a_model_is_made() -> None:
    program = """
import gc
usual = gc.get_threshold()
from quantflow import process_memory
process_memory.search_seldom()
seldom = gc.get_threshold()
from transformers import LlamaConfig
from quantflow.models.skeleton import skeleton
size = dict(hidden_size=16, intermediate_size=16, vocab_size=16)
skeleton(LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **size))
print(seldom[0] > usual[0], gc.get_threshold() == usual)
"""
    assert _told(program) == "True True"


def test_a_process_of_somebody_else_keeps_its_own_thresholds() -> None:
    program = """
import gc
gc.set_threshold(321, 7, 5)
from quantflow import process_memory
process_memory.search_as_usual()
print(gc.get_threshold(), gc.get_freeze_count())
"""
    assert _told(program) == "(321, 7, 5) 0"


@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="the kernel gives no huge pages"
)
def test_large_tensors_lie_in_huge_pages() -> None:
    program = """
from quantflow import process_memory
process_memory.give_back_freed()
process_memory.take_huge_pages()
import torch
large = torch.ones(64 << 20, dtype=torch.uint8)
rollup = [line for line in open("/proc/self/smaps_rollup") if ":" in line and "-" not in line]
lines = dict(line.split(":") for line in rollup)
print(int(lines["AnonHugePages"].split()[0]) >= 60 << 10)
"""
    assert _told(program) == "True"


def test_what_somebody_set_for_torch_stays(monkeypatch) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    program = "import os; from quantflow import process_memory; process_memory.take_huge_pages()"
    assert _told(f"{program}; print(os.environ['THP_MEM_ALLOC_ENABLE'])") == "0"
