"""The statistics of records: deviation, one-sided t test against the target, Welch's comparison."""
import statistics
from typing import NamedTuple

from .log import Refused

ALPHA = 0.01  # what the field calls significant


def student_t():
    """Student's t of scipy, which only this tool needs. Raises Refused where it is missing."""
    try:
        from scipy.stats import t
    except ImportError:
        raise Refused("statistics need scipy: pip install -r requirements-dev.txt") from None
    return t


def deviation(values: list[float]) -> float | None:
    """The sample standard deviation, or None of a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def p_below(values: list[float], target: float) -> float | None:
    """One-sided p of "the true mean is below the target" by Student's t test, or None where there
    is no deviation to judge by."""
    sd = deviation(values)
    if not sd:
        return None
    t = (statistics.fmean(values) - target) / (sd / len(values) ** 0.5)
    return float(student_t().cdf(t, len(values) - 1))


class Welch(NamedTuple):
    difference: float  # mean of b - mean of a
    low: float  # 95 % confidence interval of the difference
    high: float
    p: float  # two-sided


def welch(a: list[float], b: list[float]) -> Welch | None:
    """Welch's t test of b against a, or None if a side has one run or neither side varies."""
    if min(len(a), len(b)) < 2:
        return None
    a_part = statistics.variance(a) / len(a)
    b_part = statistics.variance(b) / len(b)
    if a_part + b_part == 0:
        return None
    student = student_t()
    difference = statistics.fmean(b) - statistics.fmean(a)
    error = (a_part + b_part) ** 0.5
    df = error**4 / (a_part**2 / (len(a) - 1) + b_part**2 / (len(b) - 1))
    half = float(student.ppf(0.975, df)) * error
    p = float(2 * student.sf(abs(difference) / error, df))
    return Welch(difference, difference - half, difference + half, p)
