"""Counter-based Gumbel noise: 64 bits of Philox for each token of a row, and noise made of them.

If u is uniform in (0, 1), E = -log(u) is exponential and -log(E) is Gumbel noise. A token of probability
2**-40 wins if its E is about 2**-40 or less, so E needs a small relative error near 0, for which 24 bits of u
are too few. `near` is therefore the distance of u to the nearer end, 1 or 0, in units of 2**-64: float32
holds it to full precision. Near 1, where E is small, -log(-log1p(-near)) is computed as -(log(near) +
s(near)) with s a polynomial; near 0, where E is large, as -log(-log(near)). The noise is right within 1e-6
from its lowest value, -3.8, to its highest, 44.4, and a probability to one part in a million.

The logarithm is a polynomial too. Products and sums of float32 that are not contracted round in one way on
every machine, unlike a library's log: this module and the Triton kernels draw the same token from the same
logits. The CPU backends, numba and plain torch, draw from another generator, SplitMix64: see
`plain.sampling.splitmix`.
"""

import torch
from torch import Tensor

NOISE_BLOCK = 1024  # tokens half a block apart share a counter: another size gives other noise
LN_2 = 0.6931471824645996
SQRT_HALF_BITS = 0x3F3504F3
# log(1 + x) / x between sqrt(1 / 2) - 1 and sqrt(2) - 1, within 3e-8: Chebyshev nodes, degree 8.
LOG_POLYNOMIAL = (
    1.0,
    -0.49999988079071045,
    0.3333418369293213,
    -0.2500215470790863,
    0.19956977665424347,
    -0.16560696065425873,
    0.14949095249176025,
    -0.14377330243587494,
    0.08743945509195328,
)
# log(-log1p(-x) / x) / x between 0 and 1 / 2, within 6e-8: likewise, degree 7.
SMALL_POLYNOMIAL = (
    0.4999999701976776,
    0.2083432674407959,
    0.12460043281316757,
    0.09319692105054855,
    0.02195100672543049,
    0.22096741199493408,
    -0.2905476987361908,
    0.32765263319015503,
)
_WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Compute Philox 4x32-10 (Salmon et al. 2011): four words from a counter and a key, as u32 in i64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2**64, in two's complement
        c0, c1 = (second >> 32) & _WORD ^ c1 ^ k0, second & _WORD
        c2, c3 = (first >> 32) & _WORD ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def random_bits(
    seeds: Tensor,  # i64[...]
    positions: Tensor,  # i64[...], like seeds or to broadcast with them
    tokens: Tensor,  # i64[...], likewise
) -> Tensor:  # i64[...]
    """Return 64 random bits for each (seed, position, token): two words of Philox, keyed by the seed."""
    half = NOISE_BLOCK // 2
    counter = tokens // NOISE_BLOCK * half + tokens % half
    zero = torch.zeros_like(counter)
    words = philox(
        (counter, zero + (positions & _WORD), zero + ((positions >> 32) & _WORD), zero),
        (seeds & _WORD, (seeds >> 32) & _WORD),
    )
    in_second = tokens % NOISE_BLOCK >= half
    return torch.where(in_second, words[2] << 32 | words[3], words[0] << 32 | words[1])


def gumbel(bits: Tensor) -> Tensor:  # i64[...] -> f32[...]
    """Make Gumbel noise from 64 random bits. Negative bits lie nearer to u = 0, where E is large."""
    near = ((bits ^ (bits >> 63)) | 1).float() * 2.0**-64
    log_near = _log(near)
    small = -(log_near + near * _polynomial(near, SMALL_POLYNOMIAL))
    return torch.where(bits >= 0, small, -_log(-log_near))


def gumbel_noise(
    seeds: Tensor, positions: Tensor, vocab_size: int
) -> Tensor:  # i64[n], i64[n] -> f32[n, vocab]
    """Return the noise for every token of n rows."""
    tokens = torch.arange(vocab_size, device=seeds.device)[None, :]
    return gumbel(random_bits(seeds[:, None], positions[:, None], tokens))


def _log(x: Tensor) -> Tensor:
    """Return exponent * log(2) + log(1 + rest), with 1 + rest between sqrt(1 / 2) and sqrt(2)."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    rest = (bits - (exponent << 23)).view(torch.float32) - 1.0
    return exponent.float() * LN_2 + rest * _polynomial(rest, LOG_POLYNOMIAL)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value
