"""The constants of the paper's Theorem 1, as powers of ten: they overflow any float long before they say anything.

C = 2 (1 + p^-N) / (1 - p^N) and q = (1 - p^N)^(1/N), p the smallest positive weight of P, bound how slowly mixing may
go. The theorem then asks for a rate beta of at most min(1/L, N/2, (1 - q) / (3 sqrt(2) C L N)), and Corollary 1, which
sets alpha = 1 / (tau sqrt(K)) and beta = sqrt(N/K), for as many rounds K as make its rates so small. Two repairs:

- alpha: printed as alpha <= (1 + 36 tau^2) / (tau L), where the proof uses alpha tau L (1 + 36 tau^2) <= 1;
- beta: the proof needs (1 - q)^2 >= 18 C^2 L^2 N^2 (beta^2 + N (2 alpha tau + beta)), which the printed beta does not
  give, and beta <= N L^2 / (2 L^2 + 2) where the theorem prints N/2; the rounds that the corollary prints heed it.

They rank the full graph worst and the ring best, against all experience. What mixing does is said by the spectral gap.
"""

from dataclasses import asdict, dataclass
from math import e, exp, expm1, inf, log, log1p, log10, sqrt
from typing import Any

from manyheads.topology import Mixing, spectral

_MOST_ROUNDS = 9.0
"""log10 of more rounds than anybody runs: constants that ask for more say nothing."""

_TINY = 1e-12
"""Below it log(1 - x) is -x to the last digit."""


@dataclass(frozen=True)
class TheoremConstants:
    """Theorem 1's constants, each as log10."""

    c: float
    one_minus_q: float
    beta: float
    """The largest rate of the representation that the theorem allows."""
    rounds_printed: float
    """Rounds that Corollary 1 takes under the printed conditions."""
    rounds_repaired: float
    """Under those the proof needs."""

    @property
    def vacuous(self) -> bool:
        """Whether they ask for more rounds than anybody runs."""
        return self.rounds_repaired > _MOST_ROUNDS


def constants(smallest_weight: float, num_workers: int, *, lipschitz: float = 1.0, tau: int = 2) -> TheoremConstants:
    """The constants of N >= 2 workers from the smallest positive weight of P, below 1; computed in logarithms."""
    n, lip = num_workers, lipschitz
    power = n * log(smallest_weight)
    p_n = exp(power)
    log_c = log(2) - power + log1p(p_n) - log1p(-p_n)
    log_gap = log(-expm1(log1p(-p_n) / n)) if p_n > _TINY else power - log(n)
    log_beta = min(-log(lip), log(n / 2), log_gap - log(3 * sqrt(2) * lip * n) - log_c)
    log_cap = min(-log(lip), log(n * lip**2 / (2 * lip**2 + 2)))
    # The corollary prints rounds for the proof's bound on beta, not for N/2; those for alpha are fewer than for 1/L.
    printed = log(n) - 2 * min(log_beta, log_cap)

    # With u = 1 / sqrt(K) the repaired condition reads N u^2 + N (2 + sqrt(N)) u <= r.
    log_r = 2 * log_gap - log(18 * (lip * n) ** 2) - 2 * log_c
    linear = n * (2 + sqrt(n))
    log_u = log(2) + log_r - log(linear + sqrt(linear**2 + 4 * n * exp(log_r)))
    repaired = max(-2 * log_u, log(n) - 2 * log_cap, 2 * log(lip * (1 + 36 * tau**2)))
    return TheoremConstants(*(value * log10(e) for value in (log_c, log_gap, log_beta, printed, repaired)))


@dataclass(frozen=True)
class Problem:
    """What Theorem 1's bound is computed from, estimated where a run stands."""

    start_loss: float
    """f at the start; its minimum is taken as 0, which no loss for classes is below."""
    rounds: int
    workers: int
    beta: float
    alpha: float
    tau: int
    lipschitz: float
    noise: float
    """sigma^2, the larger of representation and heads."""
    variability: float
    """varsigma^2."""

    def bound(self) -> dict[str, float]:
        """The terms of the bound on the mean of M(k): a bound only if the rates are as small as the theorem asks."""
        n, beta, alpha, tau, lip = self.workers, self.beta, self.alpha, self.tau, self.lipschitz
        head_drift = 12 * alpha**3 * lip**2 * tau * (tau - 1) * (6 * tau + 1) / beta
        apart = 2 * beta / n * (1 + lip**-2)
        return {
            "start": 4 * self.start_loss / (self.rounds * beta),
            "mini-batches": 2 * beta * lip / n * self.noise,
            "head drift": head_drift * self.noise,
            "head mini-batches": 2 * alpha**2 * tau * lip / beta * self.noise,
            "consensus": apart * (self.noise / 3 + self.variability),
        }


@dataclass(frozen=True)
class Assessment:
    """How fast a mixing mixes, and what the theorem makes of it."""

    gap: float
    constants: TheoremConstants | None
    """None: the theorem does not apply, as it takes one doubly stochastic P that mixes."""
    lipschitz: float
    tau: int

    @property
    def verdict(self) -> str:
        """What the theorem is good for here."""
        if self.constants is None:
            return "does not apply"
        return "vacuous" if self.constants.vacuous else "within reach"

    @property
    def numbers(self) -> dict[str, Any]:
        """Everything by name, for a file."""
        powers = {} if self.constants is None else asdict(self.constants)
        found = {f"log10_{name}": power for name, power in powers.items()}
        return {"spectral_gap": self.gap, "theorem_1": self.verdict, **found}


def assess(mixing: Mixing, *, lipschitz: float = 1.0, tau: int = 2) -> Assessment:
    """The spectral gap of a mixing, and the constants beside it; L is above 0."""
    weights = mixing.rows(0).weights
    smallest = float(weights[weights > 0].min())
    applies = mixing.period == 1 and mixing.doubly_stochastic and smallest < 1
    found = constants(smallest, mixing.num_workers, lipschitz=lipschitz, tau=tau) if applies else None
    return Assessment(spectral(mixing).gap, found, lipschitz, tau)


def describe(known: Assessment) -> list[tuple[str, str]]:
    """Theorem 1's constants as (label, value) lines, the spectral gap beside them."""
    gap, found, lip = known.gap, known.constants, known.lipschitz
    if found is None:
        return [("theorem 1", "does not apply: it needs workers that mix, with one doubly stochastic P for all rounds")]
    return [
        ("theorem 1", f"its constants for L = {lip:.3g}, tau = {known.tau} ({known.verdict}), beside the spectral gap"),
        ("  C", _power(found.c)),
        ("  1 - q", f"{_power(found.one_minus_q)} (spectral gap {_power(log10(gap) if gap > 0 else -inf)})"),
        ("  largest beta", f"{_power(found.beta)} (rule of thumb: a share of gap / L = {gap / lip:.2g})"),
        ("  fewest rounds", f"{_power(found.rounds_printed)} as printed, {_power(found.rounds_repaired)} repaired"),
    ]


def _power(log10_value: float) -> str:
    return f"10^{log10_value:.1f}"
