"""The statistics of records: spread, one-sided t against the target, Welch's comparison, runs still
needed."""
import statistics
from dataclasses import dataclass

from .log import Refused

ALPHA = 0.01  # what the field calls significant
POWER = 0.8
MOST_RUNS = 200  # a side; an effect that needs more is not worth settling
INSTALL = "install it with `pip install -r requirements-dev.txt`"


def distributions():
    """(Student's t, the noncentral t) of scipy. Raises Refused where scipy is not installed."""
    try:
        from scipy.stats import nct, t
    except ImportError:
        raise Refused(f"statistics need scipy, which is not installed here; {INSTALL}.") from None
    return t, nct


def have_scipy():
    """Whether anything with a p-value can be computed here."""
    try:
        distributions()
    except Refused:
        return False
    return True


def spread(values):
    """Sample standard deviation, or None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def p_below(values, target):
    """One-sided p of "the true mean is below the target" (Student's t), or None where there is no
    target or no spread."""
    sd = spread(values)
    if target is None or not sd:
        return None
    student, _ = distributions()
    t = (statistics.fmean(values) - target) / (sd / len(values) ** 0.5)
    return float(student.cdf(t, len(values) - 1))


@dataclass
class Welch:
    diff: float  # mean of b - mean of a
    low: float  # 95 % confidence interval of diff
    high: float
    t: float
    df: float
    p: float  # two-sided
    g: float  # Hedges' g: diff in pooled standard deviations, corrected for few runs
    g_low: float  # its approximate 95 % interval (large-sample standard error of Hedges and Olkin)
    g_high: float
    # further runs a side for POWER at ALPHA if the effect is as observed; None: over MOST_RUNS
    more: int | None


def welch(a, b):
    """Welch's t test of b against a, or None if a side has one run or neither side has any
    spread."""
    if min(len(a), len(b)) < 2:
        return None
    va, vb = statistics.variance(a), statistics.variance(b)
    if va + vb == 0:
        return None
    student, _ = distributions()
    na, nb = len(a), len(b)
    diff = statistics.fmean(b) - statistics.fmean(a)
    error = (va / na + vb / nb) ** 0.5
    df = error**4 / ((va / na) ** 2 / (na - 1) + (vb / nb) ** 2 / (nb - 1))
    half = float(student.ppf(0.975, df)) * error
    pooled = (((na - 1) * va + (nb - 1) * vb) / (na + nb - 2)) ** 0.5
    g = diff / pooled * (1 - 3 / (4 * (na + nb - 2) - 1))
    g_half = 1.96 * ((na + nb) / (na * nb) + g * g / (2 * (na + nb))) ** 0.5
    needed = runs_needed(diff / ((va + vb) / 2) ** 0.5)
    t = diff / error
    return Welch(
        diff=diff,
        low=diff - half,
        high=diff + half,
        t=t,
        df=df,
        p=float(2 * student.sf(abs(t), df)),
        g=g,
        g_low=g - g_half,
        g_high=g + g_half,
        more=needed and max(1, needed - min(na, nb)),
    )


def runs_needed(effect):
    """Runs a side for a two-sided t test at ALPHA to find `effect` (in standard deviations) with
    POWER, or None."""
    student, nct = distributions()
    effect = min(abs(effect), 20.0)  # beyond it two runs a side suffice, and nct loses its footing
    for n in range(2, MOST_RUNS + 1):
        critical = student.ppf(1 - ALPHA / 2, 2 * n - 2)
        if nct.sf(critical, 2 * n - 2, effect * (n / 2) ** 0.5) >= POWER:
            return n
    return None
