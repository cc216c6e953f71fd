"""Scores against their sums over pairs, in value and gradient."""

import pytest
import torch

from coulomb.attention.align.scores import (
    Centred,
    Rows,
    Target,
    WithinClass,
    as_score,
    class_vectors,
    scores,
    shuffled,
    target_alignment,
    within_class_alignment,
)

F64 = torch.float64
N = 9


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=F64)


def classes(n=N, count=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(count, (n,), generator=generator)


def within_class_by_pairs(features, labels):
    n, total = len(features), 0.0
    for i in range(n):
        for j in range(i + 1, n):
            total = total + float(labels[i] == labels[j]) * features[i] @ features[j]
    return total / (n * (n - 1))


def centred_by_matrices(features, gram):
    n = len(features)
    centring = torch.eye(n, dtype=F64) - 1 / n
    ours = centring @ features @ features.mT @ centring
    target = centring @ gram @ centring
    return (ours * target).sum() / (ours.norm() * target.norm())


def balanced_gram(labels):
    counts = torch.bincount(labels)
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    return same.to(F64) / counts[labels]


def teacher(n=N):
    factor = drawn(n, n, seed=2)
    return factor @ factor.mT


TWINS = {
    "within-class": (
        WithinClass(),
        classes(),
        lambda f: within_class_by_pairs(f, classes()),
    ),
    "centred": (
        Centred(),
        classes(),
        lambda f: centred_by_matrices(
            f, (classes().unsqueeze(0) == classes().unsqueeze(1)).to(F64)
        ),
    ),
    "balanced": (
        Centred(balanced=True),
        classes(),
        lambda f: centred_by_matrices(f, balanced_gram(classes())),
    ),
    "regression": (
        Centred(),
        drawn(N, seed=3),
        lambda f: centred_by_matrices(
            f, torch.outer(drawn(N, seed=3), drawn(N, seed=3))
        ),
    ),
    "target": (Target(), teacher(), lambda f: centred_by_matrices(f, teacher())),
}


@pytest.mark.parametrize("name", TWINS)
def test_equals_the_sum_over_pairs(name):
    score, target, by_pairs = TWINS[name]
    ours, theirs = (drawn(N, 4).requires_grad_() for _ in range(2))
    value, expected = score(Rows(ours, target)), by_pairs(theirs)
    torch.testing.assert_close(value, expected)
    value.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("name", TWINS)
def test_gradient(name):
    score, target, _ = TWINS[name]
    features = drawn(N, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda f: score(Rows(f, target)), features)


@pytest.mark.parametrize("name", TWINS)
def test_groups_are_scored_one_by_one(name):
    score, target, _ = TWINS[name]
    features = drawn(2, 3, N, 4)
    together = score(Rows(features, target))
    assert together.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            alone = score(Rows(features[i, j], target))
            torch.testing.assert_close(together[i, j], alone)


@pytest.mark.parametrize("name", TWINS)
def test_the_order_of_the_rows_does_not_matter(name):
    score, target, _ = TWINS[name]
    features, order = drawn(N, 4), torch.randperm(N, generator=torch.Generator())
    mixed = target[order][:, order] if score.pairwise else target[order]
    torch.testing.assert_close(
        score(Rows(features[order], mixed)), score(Rows(features, target))
    )


def test_every_registered_score_prefers_what_the_target_says():
    for name in scores:
        score = scores.build(name)
        labels = torch.arange(N) % 2
        good = 2.0 * labels.unsqueeze(-1).to(F64) - 1
        bad = 2.0 * ((torch.arange(N) // 2) % 2).unsqueeze(-1).to(F64) - 1
        target = good @ good.mT if score.pairwise else labels
        if score.of_logits:
            good, bad = (torch.cat([-f, f], dim=-1) for f in (good, bad))
        assert score(Rows(good, target)) > score(Rows(bad, target)) + 0.1


def test_labels_are_a_target_kernel():
    labels = class_vectors(classes()).to(F64)
    features = drawn(N, 4)
    torch.testing.assert_close(
        target_alignment(features, labels @ labels.mT),
        Centred()(Rows(features, classes())),
    )


def test_padding_does_not_count_in_a_target():
    """Sequences of 3 and 5 tokens, padded to 5, give what each gives alone."""
    features, gram = drawn(2, 5, 4), drawn(2, 5, 5, seed=4)
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    share = mask.to(F64) / mask.sum(dim=-1, keepdim=True)
    padded = target_alignment(features, gram, share)
    for i, n in enumerate((3, 5)):
        alone = target_alignment(features[i, :n], gram[i, :n, :n])
        torch.testing.assert_close(padded[i], alone)


def test_many_rows_form_no_matrix_of_pairs():
    """The matrix would take 320 GB."""
    n = 200_000
    features = torch.ones(n, 3)
    features[::2] = -1
    labels = torch.arange(n) % 2
    assert Centred()(Rows(features, labels)) == pytest.approx(1, abs=1e-3)
    # Pairs of one class: n/2 (n/2 - 1), each with product 3.
    expected = 3 * (n / 2) * (n / 2 - 1) / (n * (n - 1))
    assert WithinClass()(Rows(features, labels)) == pytest.approx(expected, rel=1e-3)


def test_centred_ignores_scale_and_shift_within_class_does_not():
    features, labels = drawn(N, 4), classes()
    other = 3 * features + 1
    torch.testing.assert_close(
        Centred()(Rows(other, labels)), Centred()(Rows(features, labels))
    )
    doubled = within_class_alignment(2 * features, class_vectors(labels).to(F64))
    torch.testing.assert_close(doubled, 4 * WithinClass()(Rows(features, labels)))


@pytest.mark.parametrize("score", [Centred(), Centred(balanced=True), WithinClass()])
def test_one_class_gives_a_finite_gradient(score):
    features = drawn(N, 4).requires_grad_()
    score(Rows(features, torch.zeros(N, dtype=torch.long))).backward()
    assert features.grad.isfinite().all()


def test_a_target_that_does_not_vary_gives_zero():
    features = drawn(N, 4).requires_grad_()
    value = target_alignment(features, torch.ones(N, N, dtype=F64))
    value.backward()
    assert value.abs() < 1e-12
    assert features.grad.isfinite().all()


def test_shuffling_keeps_the_targets_and_mixes_their_rows(generator):
    rows = [Rows(drawn(N, 2), torch.arange(N)), Rows(drawn(N, 2), torch.arange(N))]
    first, second = shuffled(rows, generator, False)
    assert first.target.sort().values.tolist() == list(range(N))
    assert first.target.tolist() != list(range(N))
    assert (first.target == second.target).all()
    gram = teacher()
    (mixed,) = shuffled([Rows(drawn(N, 2), gram)], generator, True)
    torch.testing.assert_close(
        mixed.target.diagonal().sort().values, gram.diagonal().sort().values
    )
    torch.testing.assert_close(mixed.target, mixed.target.mT)


def test_shuffling_a_padded_target_leaves_padding_where_it_is(generator):
    gram = torch.arange(25.0).view(1, 5, 5)
    share = torch.tensor([[0.25, 0.25, 0.0, 0.25, 0.25]])
    (mixed,) = shuffled([Rows(drawn(1, 5, 2), gram, share)], generator, True)
    assert mixed.target[0, 2, 2] == gram[0, 2, 2]
    ours, theirs = (m[0].diagonal().sort().values for m in (mixed.target, gram))
    assert (ours == theirs).all()


def test_names():
    assert as_score(Target()) == as_score("target")
    with pytest.raises(ValueError, match="did you mean 'centred'"):
        as_score("centered")
    with pytest.raises(TypeError, match="`objective` must be a name or a score"):
        as_score(3)
