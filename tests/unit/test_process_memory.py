"""What process_memory does to a process: each test has one of its own."""

import subprocess
import sys


def _told(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_cycles_are_searched_for_as_usual_again_once_a_model_is_made() -> None:
    program = """
import gc
usual = gc.get_threshold()
from quantflow import process_memory
process_memory.search_seldom()
seldom = gc.get_threshold()
from transformers import LlamaConfig
from quantflow.models.load import skeleton
size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
skeleton(LlamaConfig(**size))
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
