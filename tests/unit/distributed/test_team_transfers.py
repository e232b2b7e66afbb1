"""Cards exchange inputs of groups over a backend that keeps each pair's order, as NCCL does."""

import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from quantflow.core.device import HOST, Device
from quantflow.distributed import team as teams
from quantflow.distributed.launch import launched_environment
from quantflow.distributed.team import Team, backend_of

FEATURES = {0: 3, 1: 2, 2: 4, 4: 1}  # no linear of the fourth group is quantized
OF_EXPERTS = (2, 4)
SECONDS = 20.0  # in which two that wait for each other are found out


class Wires:
    """A backend without tags: two cards' operations with each other keep each one's order.

    A send ends when the other card receives it, and no operation of a pair begins before the one
    before it has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        # (card, other) -> in order
        self._begun: dict[tuple[int, int], list[tuple[str, torch.Tensor]]] = defaultdict(list)
        self._done: dict[tuple[int, int], int] = defaultdict(int)
        self._told: dict[int, torch.Tensor] = {}  # card -> its numbers

    def all_gather(self, of_cards, own, *, group):
        """Every card comes here once."""
        with self._lock:
            self._told[group] = own
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: len(self._told) == len(of_cards), timeout=SECONDS)
        for card, numbers in enumerate(of_cards):
            numbers.copy_(self._told[card])

    def isend(self, tensor, other, *, group, tag):
        assert tensor.is_contiguous()
        return self._begin("send", tensor, group, other)

    def recv(self, tensor, other, *, group, tag):
        self._begin("receive", tensor, group, other).wait()

    def _begin(self, what, tensor, card, other):
        with self._lock:
            number = len(self._begun[card, other])
            self._begun[card, other].append((what, tensor))
            self._match(card, other)

        def wait():
            with self._lock:
                ended = self._lock.wait_for(
                    lambda: self._done[card, other] > number, timeout=SECONDS
                )
            assert ended, f"card {card} waits to {what} what card {other} does not come to"

        return SimpleNamespace(wait=wait)

    def _match(self, card, other):
        """Do what both sides have come to."""
        here, there = (card, other), (other, card)
        while (number := self._done[here]) < min(len(self._begun[here]), len(self._begun[there])):
            (what, ours), (beside, theirs) = self._begun[here][number], self._begun[there][number]
            assert {what, beside} == {"send", "receive"}, f"cards {card} and {other} both {what}"
            source, target = (ours, theirs) if what == "send" else (theirs, ours)
            assert target.shape == source.shape
            target.copy_(source)
            self._done[here] = self._done[there] = number + 1
        self._lock.notify_all()


def values(sequence, number, tokens):
    """The input that a sequence gives a group: a linear of experts some of its tokens, or none."""
    if number in OF_EXPERTS:
        return torch.full(((tokens + sequence) % 3, FEATURES[number]), float(number))
    return torch.full((1, tokens, FEATURES[number]), float(100 * sequence + number))


@pytest.mark.parametrize("owners", [(), (0, 0, 1, 0, 1)])
@pytest.mark.parametrize(
    ("world", "tokens"), [(1, [5]), (2, [5, 7]), (3, [5, 7, 6]), (3, [4, 2]), (4, [1, 2, 3, 4])]
)
def test_every_card_adds_up_its_groups_in_the_order_of_the_sequences_and_none_waits_for_ever(
    monkeypatch, world, tokens, owners
):
    if world == 1:
        owners = ()
    monkeypatch.setattr(teams, "distributed", Wires())
    added, failed = defaultdict(list), []

    def card(rank):
        try:
            ran = rank < len(tokens)  # the last sequences are fewer than the cards
            inputs = (
                {number: values(rank, number, tokens[rank]) for number in FEATURES} if ran else {}
            )
            inputs = {number: x for number, x in inputs.items() if x.numel()}
            team = Team(rank=rank, world=world, group=rank, owners=owners)
            team.gather(
                inputs,
                FEATURES,
                add=lambda number, x: added[number].append((rank, x.clone())),
            )
            assert not inputs
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=card, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for number, features in FEATURES.items():
        owner = owners[number] if owners else number % world
        expected = [values(sequence, number, count) for sequence, count in enumerate(tokens)]
        expected = [x.reshape(1, -1, features) for x in expected if x.numel()]
        assert [rank for rank, _ in added[number]] == [owner] * len(expected)
        for (_, x), value in zip(added[number], expected, strict=True):
            assert torch.equal(x.reshape(1, -1, features), value)


def test_tensors_of_a_device_go_by_torchs_backend_for_it_and_those_of_host_memory_by_gloo(
    monkeypatch,
):
    there = Device(kind=torch.device("cuda", 0), model="a GPU", capability="9.0")
    assert backend_of(HOST) == "gloo"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert backend_of(there) == "nccl"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert backend_of(there) is None


@pytest.mark.parametrize(("built", "backends"), [(True, "cpu:gloo,cuda:nccl"), (False, "gloo")])
def test_ranks_meet_with_the_backends_of_both_memories_where_torch_has_them(
    monkeypatch, tmp_path, built, backends
):
    met = []
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: built)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **_: met.append(backend)
    )
    for name, value in launched_environment(str(tmp_path), rank=0, world=1).items():
        monkeypatch.setenv(name, value)
    there = Device(kind=torch.device("cuda", 0), model="a GPU", capability="9.0")
    teams.meet(teams.MEETING, there)
    teams.meet(teams.MEETING)
    assert met == [backends, "gloo"]
