"""The statistics of records against closed forms and published tables, never against the code's own formulae."""
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from records import stats


def test_one_sided_t_against_closed_forms():
    # df = 1 is a Cauchy: P(T < t) = 1/2 + atan(t) / pi; df = 2: P(T < t) = 1/2 + t / (2 sqrt(2 + t^2))
    assert stats.p_below([1.0, 3.0], 5.0) == pytest.approx(0.5 + math.atan(-3) / math.pi)
    t = (2 - 2.5) / (1 / math.sqrt(3))
    assert stats.p_below([1.0, 2.0, 3.0], 2.5) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    assert stats.p_below([1.0, 2.0, 3.0], 1.5) > 0.5
    assert stats.p_below([1.0], 2.0) is None and stats.p_below([1.0, 1.0], 2.0) is None


def test_welch_against_hand_computation():
    # a: mean 2, variance 1, n 3; b: mean 6, variance 4, n 3: error^2 = 5/3, df = (5/3)^2 / ((1/9 + 16/9) / 2) = 50/17
    w = stats.welch([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    assert w.diff == 4 and w.t == pytest.approx(4 / math.sqrt(5 / 3)) and w.df == pytest.approx(50 / 17)
    # pooled variance 5/2, correction 1 - 3 / 15
    g = 4 / math.sqrt(2.5) * 0.8
    half = 1.96 * math.sqrt(6 / 9 + g * g / 12)
    assert (w.g, w.g_low, w.g_high) == pytest.approx((g, g - half, g + half))


def test_welch_at_equal_variances_is_the_tabulated_t():
    # n 3 + 3, equal variances: df = 4, whose tabulated two-sided 5 % point is 2.776
    w = stats.welch([-1.0, 0.0, 1.0], [1.0, 2.0, 3.0])
    assert w.df == pytest.approx(4) and w.high - w.diff == pytest.approx(2.776 * math.sqrt(2 / 3), rel=1e-3)
    x = w.t / math.sqrt(w.t**2 + 4)  # df = 4 in closed form: P(|T| > t) = 1 - (3 x - x^3) / 2
    assert w.p == pytest.approx(1 - (3 * x - x**3) / 2)


def test_welch_with_nothing_to_test():
    assert stats.welch([1.0], [1.0, 2.0]) is None and stats.welch([1.0, 1.0], [2.0, 2.0]) is None
    assert stats.welch([1.0, 1.0], [2.0, 2.1]).p < 0.05  # one side may be constant


@pytest.mark.parametrize("effect, runs", [(1.0, 26), (0.8, 39), (1.5, 13), (-1.0, 26)])
def test_runs_needed_against_the_normal_approximation(effect, runs):
    # n = 2 ((z_0.995 + z_0.8) / d)^2 + z_0.995^2 / 4, the usual correction of the normal formula for a t test
    approximate = 2 * ((2.5758 + 0.8416) / effect) ** 2 + 2.5758**2 / 4
    assert stats.runs_needed(effect) == runs == pytest.approx(approximate, abs=1.01)


def test_runs_needed_at_the_extremes():
    assert stats.runs_needed(0.0) is None and stats.runs_needed(0.1) is None
    assert stats.runs_needed(1e6) == 2 and stats.welch([1.0, 1.1], [1.0, 1.1]).more is None
