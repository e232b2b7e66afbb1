"""Hadamard rotations with random signs, of any size, applied without writing out a matrix.

A Hadamard matrix has entries of 1 and -1 and orthogonal rows, so a product with it spreads each
channel evenly over all. One of size 2^k is made by doubling (Sylvester); other orders are made from
quadratic residues (Paley), and products of the two kinds are Hadamard again. Where no matrix of a
size is known here, blocks of a power of two are rotated by themselves. Sources: Sylvester 1867;
Paley 1933, "On orthogonal matrices", constructions I and II; Ashkboos et al. 2024,
arXiv:2404.00456, section 3, for the random signs; section 4, stage 1b, for `mixed`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantflow.core import groups
from quantflow.errors import InputError

_LARGEST_CORE = 512  # a larger core would dominate the time of the rotation


@dataclass(frozen=True, kw_only=True)
class HadamardRotation:
    """An orthogonal matrix Q = diag(signs) (core (x) H_block) / sqrt(mixes).

    Attributes:
        signs: [n] float32, 1 or -1.
        core: [c, c] float32, a Hadamard matrix, or the identity where none of c is known.
        block: a power of two; n = c * block.
    """

    signs: Tensor
    core: Tensor
    block: int

    @property
    def size(self) -> int:
        """The number of rotated channels: n."""
        return self.signs.numel()

    @property
    def mixes(self) -> int:
        """The number of channels that each one is spread over: n, or the block with no core."""
        return self.block * int((self.core[0] != 0).sum())


def rotation(size: int, *, seed: int, sequence: int = 0) -> HadamardRotation:
    """A rotation of `size` channels whose signs come from a seed.

    Args:
        size: n, at least 1.
        seed: seed of the model's rotations.
        sequence: number of the rotation, so that rotations of one size differ.

    Raises:
        InputError: size is less than 1.
    """
    if size < 1:
        raise InputError(f"rotation: size={size}", "rotate at least one channel")
    generator = torch.Generator().manual_seed((seed << 8) + sequence)
    signs = torch.randint(2, (size,), generator=generator).float() * 2 - 1
    block = size & -size  # the largest power of two in it
    odd = size // block
    if odd == 1:
        return HadamardRotation(signs=signs, core=torch.ones(1, 1), block=block)
    order = odd
    while order <= min(size, _LARGEST_CORE):
        core = paley(order) if size % order == 0 else None
        if core is not None:
            return HadamardRotation(signs=signs, core=core, block=size // order)
        order *= 2
    return HadamardRotation(signs=signs, core=torch.eye(odd), block=block)


def rotated(x: Tensor, by: HadamardRotation) -> Tensor:
    """Product x Q, float32, of x's shape.

    Args:
        x: [..., k * n], any float dtype; each n channels are rotated by themselves.
        by: rotation of n channels.

    Raises:
        InputError: n does not divide the last dimension.
    """
    if x.shape[-1] % by.size:
        raise InputError(
            f"rotation: {x.shape[-1]} channels, it is one of {by.size}",
            "rotate by one that divides them",
        )
    cores = by.core.shape[0]
    y = _butterfly(x.float().reshape(-1, by.size) * by.signs, by.block)  # [r, n]
    if cores > 1:
        y = by.core.T @ y.reshape(-1, cores, by.block)  # [r, c, b]
    return y.reshape(x.shape).mul_(float(by.mixes) ** -0.5)


def mixed(x: Tensor, block: int) -> Tensor:
    """Product x H in x's dtype, with H Sylvester's matrix over sqrt(block), its own inverse.

    It has no signs, so that a file needs to hold no more than `block`. The model computes it while
    it runs; it is not folded into weights.

    Args:
        x: [..., k * block], any float dtype; each `block` channels are mixed by themselves, in
            float32.
        block: a power of two.

    Raises:
        InputError: block does not divide the last dimension, or is no power of two.
    """
    if block < 1 or block & (block - 1) or x.shape[-1] % block:
        raise InputError(
            f"rotation: {x.shape[-1]} channels by {block}",
            "mix by a power of two that divides them",
        )
    return (
        _butterfly(x.float().reshape(-1, block), block)
        .mul(block**-0.5)
        .reshape(x.shape)
        .to(x.dtype)
    )


def _butterfly(y: Tensor, block: int) -> Tensor:
    """The unscaled Walsh-Hadamard transform of each `block` channels of y [r, n]."""
    half, size = 1, y.shape[-1]
    while half < block:  # sums and differences at distance `half`
        pairs = y.reshape(-1, 2, half)
        y = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], dim=1).reshape(
            -1, size
        )
        half *= 2
    return y


def rotate_rows_(target: Tensor, source: Tensor, by: HadamardRotation) -> Tensor:
    """Fill `target` [O, I] with source Q, a few rows at a time, rounded to its dtype; return it."""
    for rows in groups.row_units(source):
        target[rows] = rotated(source[rows], by).to(target.dtype)
    return target


def rotate_columns_(target: Tensor, source: Tensor, by: HadamardRotation) -> Tensor:
    """Fill `target` [O, I] with Q^T source, a few columns at a time, in its dtype; return it."""
    for columns in groups.spans(source.shape[1], max(1, groups.UNIT_ELEMENTS // source.shape[0])):
        target[:, columns] = rotated(source[:, columns].T, by).T.to(target.dtype)
    return target


def paley(order: int) -> Tensor | None:
    """A Hadamard matrix of `order` by Paley's constructions, [order, order] float32.

    None where neither construction makes one.
    """
    prime = order - 1
    if order % 4 == 0 and _is_prime(prime):  # construction I: prime % 4 == 3
        core = torch.zeros(order, order)
        core[0, 1:], core[1:, 0], core[1:, 1:] = 1, -1, _residues(prime)
        return core + torch.eye(order)
    prime = order // 2 - 1  # construction II
    if order % 4 == 0 and prime % 4 == 1 and _is_prime(prime):
        conference = torch.zeros(prime + 1, prime + 1)
        conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, _residues(prime)
        both = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        alone = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        return torch.kron(conference, both) + torch.kron(torch.eye(prime + 1), alone)
    return None


def _residues(prime: int) -> Tensor:
    """Jacobsthal's matrix, [p, p]: 1 where i - j is a square modulo p, -1 where not, 0 at i = j."""
    character = torch.full((prime,), -1.0)
    character[[i * i % prime for i in range(1, prime)]] = 1.0
    character[0] = 0.0
    index = torch.arange(prime)
    return character[(index[:, None] - index) % prime]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
