"""Random numbers that follow from (seed, position) alone, by SplitMix64, in plain torch."""

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15


def uniforms(bits: Tensor) -> Tensor:  # i64[...] -> f64[...]
    """A number in (0, 1) of 52 random bits for each."""
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52


def mixed(seeds: Tensor, positions: Tensor) -> Tensor:  # i64[n] -> i64[n]
    """Random bits for each (seed, position), by two rounds of SplitMix64 (Steele et al., 2014)."""
    return splitmix64(splitmix64(seeds) ^ positions)


def nth(seeds: Tensor, n: Tensor) -> Tensor:  # i64[...] -> i64[...]
    """The n-th random bits of the stream that a seed begins."""
    return splitmix64(seeds + n * _signed(GOLDEN))


def splitmix64(x: Tensor) -> Tensor:  # i64[n] -> i64[n]
    """The next 64 random bits after these; int64 arithmetic wraps as unsigned would."""
    x = x + _signed(GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """x >> by of an unsigned number."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
