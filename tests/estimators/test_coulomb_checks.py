"""scikit-learn's own checks, in full."""

from sklearn.utils.estimator_checks import parametrize_with_checks

from coulomb import CoulombSampler


@parametrize_with_checks(
    [
        CoulombSampler(16),
        CoulombSampler(16, max_iter=5, gamma="scale", coordinates="all"),
    ]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)
