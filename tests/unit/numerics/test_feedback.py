"""Error feedback: two columns by hand, and the factorisation that its header states."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from quantflow import accelerators
from quantflow.core.scheme import TensorScheme
from quantflow.numerics import feedback as feedback_module
from quantflow.numerics.feedback import Feedback, feedback_of, round_columns_

INT4 = TensorScheme(kind="int", num_bits=4, granularity="per_channel")


def one_plus_u(feedback: Feedback) -> torch.Tensor:
    """I + U in the order of rounding, float64: the stored factor with rows and columns reversed."""
    size = feedback.order.numel()
    return torch.eye(size).double() + feedback.lower.tril(-1).double().flip(0, 1)


def test_the_error_of_the_first_column_is_added_to_the_second_worked_by_hand():
    # The second column has the larger diagonal, 4.04 with a damping of 0.04, and is rounded first:
    # 1.4 to 1, e = 0.4. H = (I + U) D (I + U)^T has D = 2.04 for the first column and U = 2 / 2.04,
    # so it aims at 1.2 + 0.4 * 2 / 2.04 = 1.592 and rounds to 2, e = -0.8. With the other sign it
    # would aim at 0.808 and round to 1.
    feedback = feedback_of(torch.tensor([[2.0, 2.0], [2.0, 4.0]]), name="w", dampings=[0.04 / 3])
    assert feedback.order.tolist() == [0, 1]  # the last one to be rounded first
    work = torch.tensor([[1.2], [1.4]])
    qvalue = round_columns_(work, torch.ones(1, 1), None, scheme=INT4, feedback=feedback)
    assert qvalue.tolist() == [[2], [1]]
    torch.testing.assert_close(work, torch.tensor([[-0.8], [0.4]]))


def test_the_loss_is_that_of_rounding_every_aim_to_nearest():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 9, generator=generator) @ torch.randn(9, 9, generator=generator)
    weight = 2 * torch.randn(5, 9, generator=generator)
    feedback = feedback_of(x.T @ x, name="w")
    order = feedback.order.flip(0)
    damped = (x.T @ x).double() + feedback.damping * torch.eye(9).double()
    hessian = damped[order][:, order]
    unit_upper = one_plus_u(feedback)
    # H = (I + U) D (I + U)^T with a diagonal D
    inverse = torch.linalg.inv(unit_upper)
    factor = inverse @ hessian @ inverse.T
    d = factor.diagonal()
    assert (d > 0).all()
    torch.testing.assert_close(factor, torch.diag(d), rtol=0, atol=1e-4 * d.max().item())

    work = weight[:, feedback.order].T.contiguous()
    qvalue = round_columns_(work, torch.ones(1, 5), None, scheme=INT4, feedback=feedback)
    rounded = qvalue.T[:, order].double()
    errors = work.T.flip(1).double()
    torch.testing.assert_close(errors, weight[:, order].double() - rounded, rtol=0, atol=1e-6)
    aims = weight[:, order].double() + errors @ (unit_upper - torch.eye(9))
    torch.testing.assert_close(aims.round().clamp(-8, 7), rounded)
    torch.testing.assert_close(
        torch.trace(errors @ hessian @ errors.T),
        (d * (aims - rounded).square()).sum(),
        rtol=1e-4,
        atol=0.0,
    )


def test_blocks_that_are_no_whole_number_of_blocks_aim_and_round_as_their_header_says():
    # 300 columns: two blocks of 128 and one of 44, whose last part has 12; groups of 60 columns
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(900, 300, generator=generator) @ torch.randn(300, 300, generator=generator)
    weight = torch.randn(5, 300, generator=generator)
    scales = 0.25 + torch.rand(5, 5, generator=generator)  # [G, R]
    zero_points = torch.tensor([-3.0, 0.0, 2.0, 1.0, -1.0])[:, None].expand(5, 5)
    scheme = replace(INT4, granularity="per_group", group_size=60, symmetric=False)
    feedback = feedback_of(x.T @ x, name="w")
    work = weight[:, feedback.order].T.contiguous()
    qvalue = round_columns_(work, scales, zero_points, scheme=scheme, feedback=feedback)

    group = torch.arange(300) // 60
    rounded = (qvalue.double() - zero_points[group]) * scales[group]  # [I, R]
    order = feedback.order.flip(0)
    errors = work.T.flip(1).double()
    wanted = weight[:, order].double()
    torch.testing.assert_close(errors, wanted - rounded.T[:, order], rtol=0, atol=1e-5)
    aims = wanted + errors @ (one_plus_u(feedback) - torch.eye(300))
    steps = aims / scales[group].T[:, order] + zero_points[group].T[:, order]
    assert torch.equal(steps.round().clamp(-8, 7), qvalue.T[:, order].double())


def test_the_kernel_of_gpus_is_never_used_on_a_cpu_nor_without_triton(monkeypatch):
    loop, chosen = feedback_module._Blocks, feedback_module._rounding_of_blocks
    imported = []
    kernel = SimpleNamespace(round_block_=object(), takes=lambda scheme: scheme.num_bits == 4)
    monkeypatch.setattr(
        feedback_module, "import_module", lambda name: imported.append(name) or kernel
    )
    monkeypatch.setattr(accelerators, "has_triton", lambda: False)
    for device in ("cpu", "cuda", "xpu"):
        assert chosen(torch.device(device), INT4) is loop
    monkeypatch.setattr(accelerators, "has_triton", lambda: True)
    assert chosen(torch.device("cpu"), INT4) is loop
    assert imported == []
    for device in ("cuda", "xpu"):
        assert chosen(torch.device(device), INT4) is kernel.round_block_
    assert chosen(torch.device("cuda"), replace(INT4, num_bits=8)) is loop  # it does not take it
    assert imported == ["quantflow.numerics.columns_kernel"] * 3
