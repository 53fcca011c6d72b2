"""Tolerances of the tests: each with its derivation and a mutant it must catch.

Bitwise and exact-count tests have none and are not listed.
"""

SIGMAS = 5.0
"""Standard errors allowed for the mean of stochastic rounding, sqrt(f (1 - f) / n) steps.

Two-sided tail 5.7e-7: over 300 seeds x 8 tests a false alarm has probability 1.4e-3, once, as seeds
are fixed. Mutant: truncated draws (up when 16 bits < f) with a lost half step, bias 2^-17 step; or
round half away, bias 0.5 step at ties."""

CHI_SQUARE_P = 1e-4
"""Tail allowed on either side for a chi-square statistic of Philox words through a rounding rule.

The seed is fixed, so this is checked once. Mutants: words shared by neighbouring elements (variance
doubles, statistic about 2x, p < 1e-50); constant words (statistic in the millions)."""
