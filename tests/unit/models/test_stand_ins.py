"""What stands in the place of embedding and head computes what they would."""

import torch
from torch.nn import functional

from quantflow.models import stand_ins
from quantflow.models.stand_ins import Head, Rows


def test_the_rows_that_are_held_are_those_of_the_whole_embedding():
    table = torch.arange(40.0).reshape(10, 4)  # [10, 4]
    ids = torch.tensor([1, 4, 9])
    wanted = torch.tensor([[9, 1, 1, 4]])
    assert torch.equal(Rows(ids, table[ids])(wanted), functional.embedding(wanted, table))


def test_the_head_in_parts_is_the_whole_head(monkeypatch):
    torch.manual_seed(0)
    weight, hidden = torch.randn(11, 8).bfloat16(), torch.randn(1, 3, 8)
    expected = hidden.double() @ weight.double().T
    for rows in (4, 11, 100):
        monkeypatch.setattr(stand_ins, "HEAD_ROWS", rows)
        found = Head(weight, dtype=torch.float32)(hidden)
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < 1e-5
