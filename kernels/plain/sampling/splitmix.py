"""Random numbers that depend on (seed, position) alone, by SplitMix64, in plain torch."""

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15


def uniforms(bits: Tensor) -> Tensor:  # i64[...] -> f64[...]
    """Make a number in (0, 1) from the upper 52 bits of each 64 random bits."""
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52


def mixed(seeds: Tensor, positions: Tensor) -> Tensor:  # i64[n] -> i64[n]
    """Return random bits for each (seed, position), by two rounds of SplitMix64 (Steele et al., 2014)."""
    return splitmix64(splitmix64(seeds) ^ positions)


def nth(seeds: Tensor, n: Tensor) -> Tensor:  # i64[...] -> i64[...]
    """Return the n-th 64 random bits of a seed's stream."""
    return splitmix64(seeds + n * _signed(GOLDEN))


def splitmix64(x: Tensor) -> Tensor:  # i64[n] -> i64[n]
    """Return the next 64 random bits after x. int64 arithmetic wraps like unsigned arithmetic."""
    x = x + _signed(GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right as an unsigned number."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
