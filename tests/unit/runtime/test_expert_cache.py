"""Experts that were chosen last stay in memory, as many as there is room for; others are read."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from quantflow import process_memory
from quantflow.core.scheme import PRESETS
from quantflow.errors import InputError, ResourceError
from quantflow.runtime.expert_cache import (
    CachedExpert,
    CachedLinear,
    ExpertCache,
    ExpertKey,
    MemoryLimit,
    tensor_bytes,
)

SIZE = 400  # bytes of an expert below: two linears of 50 floats


class Disk:
    """Experts whose linears give back who they are, and a note of every read."""

    def __init__(self, layers: int = 2, experts: int = 4, read: Callable | None = None) -> None:
        self.reads: list[str] = []
        self.experts = {
            ExpertKey(f"layer {layer}", number): self.expert(f"{layer}.{number}", read)
            for layer in range(layers)
            for number in range(experts)
        }

    def expert(self, name: str, read: Callable | None) -> CachedExpert:
        def make(leaf: str):
            self.reads.append(f"{name}.{leaf}")
            if read is not None:
                read(f"{name}.{leaf}")
            return Weight(torch.ones(50), f"{name}.{leaf}")

        linears = tuple(CachedLinear(lambda leaf=leaf: make(leaf)) for leaf in ("up", "down"))
        module = nn.Module()
        module.up, module.down = linears
        return CachedExpert(module=module, linears=linears, stored=SIZE // 4, kind="one")

    def cache(self, room: int, *, chosen: int = 2) -> ExpertCache:
        cache = ExpertCache(
            self.experts, budget=room * SIZE, left=lambda held: room * SIZE, chosen=chosen
        )
        self.reads.clear()
        return cache


class Weight(nn.Module):
    def __init__(self, weight: torch.Tensor, name: str) -> None:
        super().__init__()
        self.kept, self.name = [weight], name

    def __call__(self, x):
        return self.name


def ask(cache: ExpertCache, layer: int, *numbers: int) -> list[str]:
    found = []
    for module in cache.fetch(f"layer {layer}", numbers):
        found += [module.up(None), module.down(None)]
    return found


def named(layer: int, *numbers: int) -> list[str]:
    return [f"{layer}.{number}.{leaf}" for number in numbers for leaf in ("up", "down")]


def test_an_expert_that_stayed_in_memory_is_not_read_again():
    disk = Disk()
    cache = disk.cache(room=4)
    for _ in range(3):
        assert ask(cache, 0, 1, 3) == named(0, 1, 3)
        assert ask(cache, 1, 0, 2) == named(1, 0, 2)
    assert sorted(disk.reads) == sorted([*named(0, 1, 3), *named(1, 0, 2)])
    assert cache.summary() == {
        "hits": 8,
        "misses": 4,
        "hit_rate": 8 / 12,
        "bytes_read": 4 * SIZE // 4,
        "expert_bytes": 4 * SIZE,
        "most_expert_bytes": 4 * SIZE,
    }


def test_the_least_recently_chosen_expert_makes_room():
    disk = Disk()
    cache = disk.cache(room=3)
    ask(cache, 0, 0, 1)
    ask(cache, 1, 2)
    ask(cache, 0, 0)  # expert 1 of layer 0 is the oldest now
    disk.reads.clear()
    assert ask(cache, 1, 2, 3) == named(1, 2, 3)
    assert sorted(disk.reads) == sorted(named(1, 3))
    disk.reads.clear()
    ask(cache, 0, 0)
    assert disk.reads == []
    ask(cache, 0, 1)
    assert sorted(disk.reads) == sorted(named(0, 1))
    held = [expert for expert in disk.experts.values() if expert.linears[0].nbytes]
    assert len(held) == 3  # what left gave its tensors back


def test_experts_of_a_long_prompt_that_do_not_fit_together_come_in_turns():
    disk = Disk(layers=1, experts=7)
    cache = disk.cache(room=3)
    for _ in range(2):
        assert ask(cache, 0, *range(7)) == named(0, *range(7))
    assert cache.misses + cache.hits == 14
    assert cache.summary()["expert_bytes"] <= 3 * SIZE


def test_room_that_shrinks_takes_experts_out_down_to_those_of_one_token():
    disk, room = Disk(), [4]
    cache = ExpertCache(disk.experts, budget=4 * SIZE, left=lambda held: room[0] * SIZE, chosen=2)
    ask(cache, 0, 0, 1)
    ask(cache, 1, 0, 1)
    assert cache.summary()["expert_bytes"] == 4 * SIZE
    room[0] = -5
    assert ask(cache, 0, 2, 3) == named(0, 2, 3)
    assert cache.summary()["expert_bytes"] == 2 * SIZE


def test_missing_experts_of_a_layer_are_read_at_the_same_time():
    together = threading.Barrier(4)  # a read that waited for another one would never end
    disk = Disk()
    cache = disk.cache(room=4)
    for expert in disk.experts.values():
        for linear in expert.linears:
            linear._make = lambda own=linear._make: (together.wait(timeout=10), own())[1]
    assert ask(cache, 0, 0, 1) == named(0, 0, 1)


def test_a_read_that_fails_fails_where_the_expert_is_used_and_again_the_next_time():
    def read(name: str) -> None:
        if name == "1.3.down":
            raise InputError("experts.3.down: scale 0", "export again")

    cache = Disk(read=read).cache(room=4)
    assert ask(cache, 1, 2) == named(1, 2)
    for _ in range(2):
        with pytest.raises(InputError, match=r"experts.3.down: scale 0"):
            ask(cache, 1, 2, 3)
    assert ask(cache, 1, 2) == named(1, 2)


def test_a_limit_without_room_is_refused_with_both_numbers_if_it_was_asked_for():
    asked = MemoryLimit(nbytes=1000, words="--max-memory 1000", asked=True)
    with pytest.raises(ResourceError) as caught:
        asked.require(300, 400, "the experts of a layer that a token goes to")
    for number in (
        "generate: the experts of a layer that a token goes to need 400 bytes",
        "beside 700 ",
        "--max-memory 1000 leaves 300",
    ):
        assert number in str(caught.value)
    assert caught.value.remedy == "give --max-memory 1MB or more"
    asked.require(400, 400, "experts")
    MemoryLimit(nbytes=1000, words="", asked=False).require(300, 400, "experts")


def test_a_limit_leaves_what_is_not_resident_and_not_needed_beside(monkeypatch):
    usage = process_memory.Usage(resident=600, peak=0)
    monkeypatch.setattr(process_memory, "usage", lambda: usage)
    monkeypatch.setattr(process_memory, "available_bytes", lambda: 10**6)
    limit = MemoryLimit(nbytes=1000, words="", asked=True)
    assert limit.left(0, beside=100) == 300
    assert limit.left(250, beside=100) == 550  # held experts are resident, and theirs
    monkeypatch.setattr(process_memory, "available_bytes", lambda: 150)
    assert limit.left(0, beside=100) == 50  # the machine has less
    assert MemoryLimit.of("4GiB") == MemoryLimit(
        nbytes=4 << 30, words="--max-memory 4GiB", asked=True
    )
    assert MemoryLimit.of(None).nbytes == process_memory.total_bytes() // 10


def test_bytes_of_tensors_are_counted_once_wherever_they_lie():
    tensor = torch.zeros(10)
    module = nn.Module()
    module.register_buffer("held", tensor)
    module.others = ({"a": tensor[:5], "b": torch.zeros(3, dtype=torch.int8)}, PRESETS["W4A16"])
    assert tensor_bytes(module) == 40 + 3
    assert tensor_bytes(torch.empty(9, device="meta")) == 0
