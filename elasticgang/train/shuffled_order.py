"""A random order of the samples of a dataset, of which any places can be computed.

ORDER-1  An order contains each sample exactly once. It depends on the seed and the number of samples alone.
ORDER-2  The time and memory for some places do not grow with the dataset. A list of 10**9 samples takes 8 GB in each
    rank, and minutes: each rank would wait as long at the end of a pass, and all for one that is restarted.

Up to `_MAX_WHOLE` samples, the order is a list that torch shuffles. A larger one is a Feistel network: the number of a
place is written as two digits, of bases whose product is hardly larger than the dataset. In turn, each digit is shifted
by a hash of the other one. This maps places to numbers one to one, and each step of it can be undone. A number beyond
the dataset is mapped again, until it is within (cycle walking).
Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 5.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_MAX_WHOLE = 1 << 17
_NUM_ROUNDS = 8  # each shifts one digit
_BITS = 31  # of a digit, the factor and a key: no product has more than 62
_FACTOR = 0x4F1BBCDD  # odd, and about half of its bits are set


class ShuffledOrder:
    """The order of `num_samples` that belongs to `seed`."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num = num_samples
        self._whole: Tensor | None = None
        if num_samples <= _MAX_WHOLE:
            generator = torch.Generator().manual_seed(seed)
            self._whole = torch.randperm(num_samples, generator=generator, device="cpu")
            return
        high = math.isqrt(num_samples - 1) + 1
        self._bases = high, -(-num_samples // high)
        digest = hashlib.blake2b(seed.to_bytes(8, "big"), digest_size=4 * _NUM_ROUNDS).digest()
        self._keys = [int.from_bytes(digest[at : at + 4], "big") >> 1 for at in range(0, len(digest), 4)]

    def at(self, places: Tensor) -> Tensor:
        """ORDER-2. The samples at `places`: int64 of any one length, each from 0 to `num_samples` - 1."""
        if self._whole is not None:
            return self._whole[places]
        samples = self._mapped(places)
        while (beyond := (samples >= self._num).nonzero().flatten()).numel():
            samples[beyond] = self._mapped(samples[beyond])
        return samples

    def _mapped(self, numbers: Tensor) -> Tensor:
        """ORDER-1: one to one, of all numbers below the product of the bases."""
        digits = [numbers // self._bases[1], numbers % self._bases[1]]
        for number, key in enumerate(self._keys):
            which = number % 2
            mixed = (digits[1 - which] * _FACTOR).add_(key)
            mixed.bitwise_xor_(mixed >> _BITS)
            digits[which].add_(mixed).remainder_(self._bases[which])
        return digits[0].mul_(self._bases[1]).add_(digits[1])
