"""A battery of statistical tests for counter-based generators of 32-bit words.

Each test gives scores in standard deviations of what independent uniform bits would
give. Only the upper 16 bits of a word are tested: the bits that round to bfloat16. The
lower half adds to the probabilities of narrower formats by at most 2^-16.
"""

import itertools

import numpy as np

# Structured on purpose: zeros, neighbours, words with a single bit, and some at random.
SEEDS = [
    (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (1 << 31, 0), (0, 1 << 31),
    (2**32 - 1, 2**32 - 1), (0x9E3779B9, 0x85EBCA6B), (123, 456), (456, 123),
    (0xDEADBEEF, 0x12345678), (0x12345678, 0xDEADBEEF), (1 << 16, 1 << 16), (3, 7),
]  # fmt: skip
LAGS = (1, 2, 3, 4, 7, 8, 64, 127, 128, 256, 768, 1024, 4096, 4097, 65536)
FRACTIONS = [n / 32 + 1 / 64 for n in range(0, 32, 2)]


def battery(generate, n=1 << 18, draws=1 << 18):
    """Runs all tests.

    Args:
      generate: function of (two seed words, [n] uint32 indices) to [n] uint32 words.
      n: words a comparison.
      draws: words for the probabilities of rounding up.

    Returns:
      The largest score of each test, by its name.
    """
    streams = [upper(generate(seed, counter(n))) for seed in SEEDS]
    tests = {
        "uniform over 4096 bins": [uniformity(s >> 4) for s in streams],
        "pairs of neighbours over 64 x 64 bins": [
            uniformity((s[:-lag] >> 10 << 6) | (s[lag:] >> 10))
            for s in streams
            for lag in (1, 128)
        ],
        "each bit": [balance((s >> bit) & 1) for s in streams for bit in range(16)],
        "correlation of neighbours": [
            correlation(s[:-lag], s[lag:]) for s in streams for lag in LAGS
        ],
        "correlation between seeds": [
            correlation(a, b) for a, b in itertools.combinations(streams, 2)
        ],
        "correlation between seeds, shifted": [
            correlation(a[:-lag], b[lag:])
            for a, b in itertools.permutations(streams[:8], 2)
            for lag in (1, 2, 128)
        ],
        "pairs of seeds over 64 x 64 bins": [
            uniformity((a >> 10 << 6) | (b >> 10))
            for a, b in itertools.combinations(streams[:8], 2)
        ],
        "equal words between seeds": [
            matches(a, b) for a, b in itertools.combinations(streams, 2)
        ],
        "avalanche": avalanche(generate),
        "probability of up": probabilities(generate, draws),
    }
    return {name: max(map(abs, scores)) for name, scores in tests.items()}


def counter(n, start=0):
    """Gives [n] uint32 indices."""
    return np.arange(start, start + n, dtype=np.uint32)


def upper(words):
    """Gives the upper 16 bits."""
    return np.asarray(words) >> 16


def uniformity(values, bins=4096):
    """Pearson's chi-square, as a normal score."""
    counts = np.bincount(values, minlength=bins)
    expected = len(values) / bins
    chi_square = ((counts - expected) ** 2).sum() / expected
    return (chi_square - (bins - 1)) / np.sqrt(2 * (bins - 1))


def balance(bits):
    """The number of ones against half of all."""
    return (bits.mean() - 0.5) * 2 * np.sqrt(len(bits))


def correlation(a, b):
    """Pearson's correlation; infinite where one does not vary."""
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a @ a) * (b @ b))
    return np.inf if scale == 0 else (a @ b) / scale * np.sqrt(len(a))


def matches(a, b):
    """How often two streams agree in all 16 bits, against 1 in 65536."""
    expected = len(a) / 65536
    return ((a == b).sum() - expected) / np.sqrt(expected)


def avalanche(generate, n=1 << 14):
    """How often an output bit flips with an input bit, against half; all pairs."""
    indices = (np.arange(n, dtype=np.uint64) * 2654435761 % 2**32).astype(np.uint32)
    scores = []
    for seed in SEEDS[::5]:
        base = upper(generate(seed, indices))
        for bit in range(32):
            flip = np.uint32(1 << bit)
            first, second = (int(word) for word in seed)
            for other in (
                generate(seed, indices ^ flip),
                generate((first ^ (1 << bit), second), indices),
                generate((first, second ^ (1 << bit)), indices),
            ):
                changed = base ^ upper(other)
                scores += [balance((changed >> out) & 1) for out in range(16)]
    return scores


def probabilities(generate, draws):
    """How often a number goes up that lies a fraction of the way there."""
    words = np.asarray(generate(SEEDS[9], counter(draws))).astype(np.float64)
    scores = []
    for fraction in FRACTIONS:
        up = (words < fraction * 2**32).mean()
        sigma = np.sqrt(fraction * (1 - fraction) / draws)
        scores.append((up - fraction) / sigma)
    return scores
