"""Noise that silos share: how much each one adds, how near the sum is to one Gaussian, its cost.

Each silo adds to its integers others of a discrete Gaussian (discrete_gaussian.py), before they are
masked (Kairouz, Liu, Steinke, "The distributed discrete Gaussian mechanism for federated learning
with secure aggregation", 2021). A silo knows its own share, and may tell it. So the honest silos'
shares alone have to be noise enough; more noise costs no more.

**A sum of n shares** of variance v is not the discrete Gaussian W_nv, but near it. For another
share X_v and some c that depends on z (their theorem on the convolution of two)::

    P[W_kv + X_v = z] / P[W_(k+1)v = z]  ∝  Σ_x exp(-(x - c)² / 2s²)      s² = v k / (k + 1)

Poisson's summation gives √(2π) s (1 + e) for this, |e| ≤ r = 2 Σ_{j ≥ 1} exp(-2π² s² j²). The ratio
has mean 1 over W, so it lies between (1 - r) / (1 + r) and its inverse: its |log| is at most
5 exp(-2π² s²) if v ≥ 1. Shares that are added later bring two distributions no further apart. So,
for all shares and ``numbers`` coordinates::

    τ  =  max |log P[sum] / P[W_nv]|  ≤  5 · numbers · Σ_{k < n} exp(-2π² v k / (k + 1))

The paper's τ has 10 for 5, since a divergence compares two such sums; here point 4 counts both.

**The cost of a step** whose records are drawn with probability q. Let μ_a be the discrete Gaussian
around an integer vector a, with variance s² ≥ (σS)², and v the integer vector, |v| ≤ S, that one
record adds. Rényi divergence is quasi-convex, so the draws of all other records may be taken as
known; what they add shifts all by an integer vector. What is left to bound is D_α(m ‖ μ_0) and
D_α(μ_0 ‖ m), with m = (1 - q) μ_0 + q μ_v. Let L = μ_v / μ_0::

    E_μ0 L^k = exp((k² - k) |v|² / 2s²) · Σ_x exp(-|x - kv|² / 2s²) / Σ_x exp(-|x|² / 2s²)

1. *Integer orders, D_α(m ‖ μ_0).* For an integer k, kv is an integer vector, so both sums are
   equal. Hence E_μ0 (1 - q + qL)^α = Σ_k C(α, k) (1 - q)^(α - k) q^k E_μ0 L^k is that of the
   continuous mechanism, and the cost is at most ρ(α; σ, q) of rdp.py. At other orders it may be
   more: for S = 1 and σ = 0.8 it is, by 0.006 % at α = 1.5 and q = 0.2.
2. *The other direction* costs no more (Mironov, Talwar, Zhang, 2019, theorem 5). The reflection
   x → v - x swaps μ_0 and μ_v, so E_μ0 h(L) = E_μ0 L h(1/L). With a = 1 - q + qL, b = 1 - q + q/L
   it is therefore enough that a^α + L b^α ≥ a^(1 - α) + L b^(1 - α) for L ≥ 1, which is ::

       √a sinh(β log a)  ≥  L √b sinh(-β log b)      β = α - 1/2

   For β = 1/2 both sides are q (L - 1) / 2. Since ab - 1 = q (1 - q) (L + 1/L - 2) ≥ 0, log a is at
   least -log b, and sinh(βy) / sinh(y / 2) grows with y. So the left side is larger for β ≥ 1/2.
3. *Other orders.* (α - 1) D_α is convex in α, and 0 at α = 1 (van Erven, Harremoës, "Rényi
   divergence and Kullback-Leibler divergence", 2014, corollary 2), so it lies below a line between
   neighbouring integers. D_α is also at most what it is for q = 1, which is α |v|² / 2s² or less at
   every α: the sum over x - αv is largest for an integer αv (Canonne, Kamath, Steinke, 2020).
4. *The sum is not a discrete Gaussian*, but each probability is within e^τ of it, and so is each of
   the mixtures P and Q that are compared. ∫ P^α Q^(1 - α) grows by e^(ατ + (α - 1)τ) at most, hence
   D_α by (2α - 1) τ / (α - 1).

*Numbers that stay at a silo* are under a continuous Gaussian of the same σ in the same step, and v
has a part in them. Their factor of E_μ0 L^k is exp((k² - k) |v|² / 2s²) at every order, they are
reflected as well, and for q = 1 they cost α |v|² / 2s². So 1 to 3 hold for both kinds together.
"""

import math

from ...errors import check_local

_SLACK = 1e-9  # relative; float64 loses less
_LEAST = 1e-300  # absolute, for what float64 cannot hold


def closeness(shares: int, variance: int, numbers: int) -> float:
    """τ: how far a sum of shares of this variance is from one discrete Gaussian, at most.

    ``numbers`` is that of the coordinates. Rounded up. LocalError for a variance below 1.
    """
    check_local(variance >= 1, f"shares of noise of variance {variance}; give at least 1")
    terms = (math.exp(-2 * math.pi**2 * variance * k / (k + 1)) for k in range(1, shares))
    return 5 * numbers * math.fsum(terms) * (1 + _SLACK) + _LEAST
