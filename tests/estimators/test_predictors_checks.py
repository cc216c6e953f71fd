"""scikit-learn's own checks, in full."""

from sklearn.utils.estimator_checks import parametrize_with_checks

from coulomb import CoulombClassifier, CoulombRegressor


@parametrize_with_checks(
    [
        CoulombClassifier(16),
        CoulombClassifier(16, head="ridge"),
        CoulombRegressor(16),
    ]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)
