"""What comes back from a device in pieces."""

import pytest
import torch

from quantflow.core.device import HOST, through


@pytest.mark.parametrize("length", [0, 1, 4, 7, 8, 9, 23, 64])
@pytest.mark.parametrize("stages", [2, 3])
def test_pieces_that_arrive_as_late_as_they_may_are_all_moved_on(length, stages):
    source, target = torch.arange(length), torch.full((length,), -1)
    pending, started = [], []  # a copy that nobody waited for has not happened

    def start(stage, piece):
        pending.append((stage, piece))
        number = len(started)
        started.append(number)

        def wait():
            while len(started) - len(pending) <= number:
                late, what = pending.pop(0)
                late.copy_(what)

        return wait

    through([torch.full((4,), -2) for _ in range(stages)], source, target, start=start)
    assert target.tolist() == list(range(length))
    assert not pending


def test_a_piece_arrives_while_the_one_before_it_is_moved_on():
    began, waited = [], []

    def start(stage, piece):
        began.append(len(waited))
        stage.copy_(piece)
        return lambda: waited.append(None)

    through([torch.empty(4), torch.empty(4)], torch.rand(16), torch.empty(16), start=start)
    # two are under way before the first is waited for, and one stays under way
    assert began == [0, 0, 1, 2]


def test_the_host_is_no_gpu_and_its_tensors_stay():
    assert not HOST.is_gpu
    tensor = torch.rand(3)
    assert HOST.fetch(tensor) is tensor
