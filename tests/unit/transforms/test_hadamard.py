"""Hadamard rotation: each fold by hand and by dense matrices, errors, and why it exists."""

import pytest
import torch

from quantflow.core.orthogonal import mixed, rotated, rotation
from quantflow.errors import UsageError
from quantflow.transforms import ROTATIONS, hadamard
from tests.shared import random

OPTIONS = {"seed": 0, "heads": True, "down": False}


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def test_two_channels_worked_by_hand():
    """Q = diag(signs) [[1, 1], [1, -1]] / sqrt(2), norm weights 2 and 4.

    The columns become 2 a + 4 b and 2 a - 4 b.
    """
    by = rotation(2, seed=0)
    a, b = by.signs.tolist()
    found = hadamard.reader(
        torch.tensor([[1.0, 1.0]]), torch.tensor([2.0, 4.0]), by, dtype=torch.float32
    )
    assert found[0].tolist() == pytest.approx([(2 * a + 4 * b) / 2**0.5, (2 * a - 4 * b) / 2**0.5])


def test_what_reads_the_residual_through_a_norm_reads_the_same_of_a_rotated_one():
    by, x, weight, g = (
        rotation(96, seed=1),
        random(5, 96),
        random(7, 96, seed=1),
        random(96, seed=2),
    )
    found = norm(rotated(x, by)) @ hadamard.reader(weight, g, by, dtype=torch.float32).T
    torch.testing.assert_close(found, (norm(x) * g) @ weight.T, rtol=1e-4, atol=1e-4)


def test_what_writes_the_residual_writes_it_rotated_bias_included():
    by, z, weight, bias = (
        rotation(64, seed=1),
        random(5, 20),
        random(64, 20, seed=1),
        random(64, seed=2),
    )
    found = z @ hadamard.writer(weight, by, dtype=torch.float32).T + hadamard.writer(
        bias, by, dtype=torch.float32
    )
    torch.testing.assert_close(found, rotated(z @ weight.T + bias, by), rtol=1e-4, atol=1e-4)


def test_values_are_rotated_head_by_head_and_rotated_back_by_what_reads_them():
    """Two value heads of eight, each read by three query heads; attention averages over tokens."""
    by, x, weight, bias, output = (
        rotation(8, seed=1),
        random(5, 20),
        random(16, 20, seed=1),
        random(16, seed=2),
        random(6, 48),
    )

    def attended(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(5, 2, 1, 8).expand(5, 2, 3, 8).reshape(5, 48).cumsum(0)

    expected = attended(x @ weight.T + bias) @ output.T
    turned = x @ hadamard.values(weight, by).T + hadamard.values(bias, by)
    found = attended(turned) @ hadamard.value_reader(output, by).T
    assert not torch.allclose(turned, x @ weight.T + bias, atol=0.1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_reads_mixed_inputs_computes_the_same():
    z, weight = random(5, 24), random(7, 24, seed=1)
    found = mixed(z, 8) @ hadamard.mixed_reader(weight, 8).T
    assert not torch.allclose(hadamard.mixed_reader(weight, 8), weight, atol=0.1)
    torch.testing.assert_close(found, z @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("features", "block"), [(1024, 1024), (11008, 256), (14336, 2048), (8960, 256), (7, 1)]
)
def test_the_inputs_of_a_down_projection_are_mixed_in_the_largest_blocks_that_fit(features, block):
    assert hadamard.block_of(features) == block


def test_what_stays_in_a_file_is_rounded_to_its_dtype():
    by = rotation(64, seed=1)
    assert hadamard.writer(random(64, 4), by, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert (
        hadamard.reader(random(4, 64), torch.ones(64), by, dtype=torch.float16).dtype
        == torch.float16
    )


def test_the_head_and_the_residual_have_signs_of_their_own():
    found = hadamard.solve(hidden=64, head_dim=64, options=OPTIONS)
    assert not torch.equal(found.residual.signs, found.head.signs)
    assert hadamard.solve(hidden=64, head_dim=64, options=OPTIONS | {"heads": False}).head is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"seed": -1, "heads": True},
            r"hadamard seed=-1; give a whole number from 0 to 4294967295",
        ),
        ({"seed": 0.5, "heads": True}, r"seed=0\.5"),
        ({"seed": True, "heads": True}, r"seed=True"),
        ({"seed": 0, "heads": 1}, r"hadamard heads=1; give true or false"),
        ({"seed": 0, "heads": True, "down": "yes"}, r"hadamard down='yes'; give true or false"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        hadamard.checked(options)


def test_an_outlier_in_one_channel_is_spread_over_all():
    """Why it exists: a rotated token's largest magnitude is near that of one without outliers."""
    x = random(64, 512)
    x[:, 7] = 300
    y = rotated(x, rotation(512, seed=0))
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-4, atol=0)
    assert y.abs().max() < 0.06 * x.abs().max()  # 300 / sqrt(512) = 13, and the noise of the others
    scale = [t.abs().amax(-1, keepdim=True) / 127 for t in (x, y)]
    lost = [((t / s).round() * s - t).square().mean() for t, s in zip((x, y), scale, strict=True)]
    assert lost[1] < 0.01 * lost[0]


def test_the_table_knows_it_by_name():
    assert ROTATIONS["hadamard"] is hadamard
    assert hadamard.needs(OPTIONS) == ()
