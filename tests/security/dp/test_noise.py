"""Random numbers of private training: distribution, independence, and source."""

import numpy as np
import pytest
import torch
from scipy import stats

from staddle.errors import LocalError
from staddle.security.arithmetic.masks import KEY_BYTES, Keystream
from staddle.security.dp.noise import Randomness

MANY = 1_000_000


def fixed(byte=7):
    return Randomness(lambda size: bytes([byte]) * size)


def test_uniforms_are_the_upper_53_bits_of_the_keystream():
    words = np.empty(100, "<u8")
    Keystream(bytes([7]) * KEY_BYTES, 0).fill(words.data.cast("B"))
    assert fixed().uniform(100).tolist() == [int(word >> 11) / 2**53 for word in words.tolist()]


@pytest.mark.parametrize("count", [1, 3, 20_000])
def test_a_number_of_noise_is_four_normals_by_two(count):
    """Box and Muller by hand: of each piece of 8,192 numbers first all radii."""
    made, uniforms = fixed().normal(count), fixed()
    for at in range(0, count, 8192):
        size = min(8192, count - at)
        u, v = uniforms.uniform(2 * size), uniforms.uniform(2 * size)
        radius, angle = np.sqrt(-2 * np.log(1 - u)), 2 * np.pi * v
        four = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]).reshape(4, size)
        assert made[at : at + size] == pytest.approx(four.sum(0) / 2, rel=1e-12, abs=1e-14)


def test_noise_is_normal_and_its_numbers_independent():
    """With this key; another one fails in a thousandth of cases each."""
    made = fixed().normal(MANY)
    assert abs(made.mean()) < 4 / MANY**0.5
    assert abs(made.var() - 1) < 4 * (2 / MANY) ** 0.5
    assert stats.kstest(made, "norm").pvalue > 1e-3
    assert abs(stats.kurtosis(made)) < 4 * (24 / MANY) ** 0.5
    for lag in (1, 2, 2048, 8192, 16384):
        assert abs(np.mean(made[lag:] * made[:-lag])) < 4 / (MANY - lag) ** 0.5
        found = abs(np.mean((made[lag:] ** 2 - 1) * (made[:-lag] ** 2 - 1)))
        assert found < 4 * 2 / (MANY - lag) ** 0.5


def test_each_record_is_drawn_by_itself():
    random, counts = fixed(), np.zeros(50)
    sizes = []
    for _ in range(4000):
        drawn = random.drawn(50, 0.3)
        counts[drawn] += 1
        sizes.append(len(drawn))
    assert stats.chisquare(counts).pvalue > 1e-3
    assert abs(np.mean(sizes) - 15) < 4 * (50 * 0.3 * 0.7 / 4000) ** 0.5
    # a fixed batch size would have none
    assert np.var(sizes) == pytest.approx(50 * 0.3 * 0.7, rel=0.1)


def test_a_step_may_draw_nobody_and_with_q_one_everybody():
    assert any(len(fixed(byte).drawn(3, 0.05)) == 0 for byte in range(20))
    assert fixed().drawn(7, 1.0).tolist() == list(range(7))


@pytest.mark.parametrize("q", [0.0, -0.1, 1.1, float("nan")])
def test_a_probability_that_is_none_is_refused(q):
    with pytest.raises(LocalError, match="probability"):
        fixed().drawn(10, q)


def test_two_steps_share_nothing_whatever_is_seeded():
    torch.manual_seed(0)
    one = Randomness().normal(10)
    torch.manual_seed(0)
    assert not np.isin(one, Randomness().normal(10)).any()


def test_the_key_is_of_the_operating_system_and_never_shown():
    asked = []
    random = Randomness(lambda size: asked.append(size) or bytes(range(size)))
    assert asked == [KEY_BYTES]
    assert bytes(range(KEY_BYTES)).hex() not in repr(random) + repr(vars(random))
