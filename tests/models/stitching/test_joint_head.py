"""Heads over several taps from sums of devices: closed forms beside central solutions in float64."""

import numpy as np
import pytest
from feature_moments import CLASSES, data, merged

from fedquilt.models.stitching.algebra import class_moments, joint_head
from fedquilt.models.stitching.algebra.class_moments import ClassMoments, DeviceMoments
from fedquilt.models.stitching.algebra.joint_head import ABSENT_BIAS, StandardisedSums


def central(z: np.ndarray, y: np.ndarray, classes: int = CLASSES) -> ClassMoments:
    """The sums of all examples, by their definitions."""
    one_hot = np.eye(classes)[y]
    return ClassMoments(one_hot.sum(axis=0), one_hot.T @ z, (z - z.mean(axis=0)).T @ (z - z.mean(axis=0)))


def shares(z: np.ndarray, y: np.ndarray, devices: int, seed: int = 1) -> list[DeviceMoments]:
    """The parts of devices among which the examples are shared unevenly, most of them sorted by class."""
    order = np.argsort(y + np.random.default_rng(seed).uniform(0, 1.5, len(y)))
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, len(y)), devices - 1, replace=False))
    return [class_moments.compute_moments(z[rows], y[rows], CLASSES) for rows in np.split(order, cuts)]


def near(one: np.ndarray, other: np.ndarray, share: float = 1e-8) -> bool:
    return bool(np.abs(one - other).max() <= share * np.abs(other).max())


# -- sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 7, 60])
def test_merged_parts_are_the_sums_of_all_examples(devices):
    z, y = data()
    found, wanted = merged(shares(z, y, devices)), central(z, y)
    assert np.array_equal(found.counts, wanted.counts)
    assert near(found.totals, wanted.totals)
    assert near(found.scatter, wanted.scatter)


@pytest.mark.parametrize("n", [1, 5, 12, 40])
def test_the_factor_is_exact_and_has_no_more_rows_than_it_needs(n):
    z, y = data(n)
    found = class_moments.compute_moments(z, y, CLASSES).factor
    assert found.shape == (min(n, 12), 12)
    assert np.allclose(found, np.triu(found), atol=0)
    wanted = (z - z.mean(axis=0)).T @ (z - z.mean(axis=0))
    assert np.abs(found.T @ found - wanted).max() <= 1e-8 * max(np.abs(wanted).max(), 1e-6)


# -- the strength of a ridge ----------------------------------------------------------------------


def standard(z: np.ndarray, y: np.ndarray) -> StandardisedSums:
    return joint_head.standardise_sums(class_moments.compute_moments(z, y, CLASSES).to_sums())


def criterion_by_hat(z: np.ndarray, y: np.ndarray, ridge: float) -> float:
    """Generalised cross-validation from the matrix that maps labels to fitted labels, of n x n."""
    n = len(z)
    x = (z - z.mean(axis=0)) / z.std(axis=0)
    hat = x @ np.linalg.inv(x.T @ x + n * ridge * np.eye(x.shape[1])) @ x.T + 1 / n
    left = np.eye(CLASSES)[y] - hat @ np.eye(CLASSES)[y]
    return float((left**2).sum() / n / (1 - np.trace(hat) / n) ** 2)


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 2.0])
def test_the_criterion_is_that_of_the_explicit_hat_matrix(ridge):
    z, y = data()
    found = joint_head.best_penalty(standard(z, y), [ridge])
    assert found.criterion == pytest.approx(criterion_by_hat(z, y, ridge), rel=1e-8)


def test_the_strength_is_the_best_of_those_tried():
    z, y = data()
    given = standard(z, y)
    every = [joint_head.best_penalty(given, [ridge]) for ridge in joint_head.STRENGTHS]
    assert joint_head.best_penalty(given) == min(every, key=lambda each: each.criterion)
    few = joint_head.best_penalty(standard(*data(30, 60)))
    assert few.ridge > joint_head.best_penalty(given).ridge


@pytest.mark.parametrize("start", [0.0001, 0.1, 1000.0])
def test_a_strength_found_downhill_is_the_best_of_those_tried(start):
    for z, y in (data(), data(30, 60), data(300, 200)):
        given = standard(z, y)
        found = joint_head.search_penalty(given, joint_head.best_penalty(given, [start]))
        wanted = joint_head.best_penalty(given)
        assert found.ridge == wanted.ridge
        assert found.criterion == pytest.approx(wanted.criterion, rel=1e-8)


def test_the_criteria_of_leading_features_are_those_of_eigenvectors():
    given, ends = standard(*data(900, 300)), [1, 40, 300]
    for ridge in (1e-4, 0.1, 10.0):
        wanted = [joint_head.best_penalty(given.restrict_to(np.arange(end)), [ridge]).criterion for end in ends]
        assert joint_head.prefix_gcv_criteria(given, ridge, ends) == pytest.approx(wanted, rel=1e-8)


# -- heads ----------------------------------------------------------------------------------------


def scores(head: joint_head.LinearHead, z: np.ndarray) -> np.ndarray:
    return np.asarray(z @ head.weights.T + head.bias)


def test_the_head_is_the_discriminant_by_its_definition():
    z, y = data()
    deviation = z.std(axis=0)
    x = (z - z.mean(axis=0)) / deviation
    means = np.stack([x[y == label].mean(axis=0) for label in range(CLASSES)])
    within = sum((x[y == c] - means[c]).T @ (x[y == c] - means[c]) for c in range(CLASSES)) / len(z)
    inverse = np.linalg.inv(within + 0.2 * np.eye(12))
    centre = means.mean(axis=0)
    wanted = np.stack(
        [(x - centre) @ inverse @ (m - centre) - 0.5 * (m - centre) @ inverse @ (m - centre) for m in means], axis=1
    )
    found = scores(joint_head.fit_discriminant(standard(z, y), 0.2), z)
    assert np.abs(found - wanted).max() <= 1e-8 * np.abs(wanted).max()


def test_classes_count_alike_however_many_examples_they_have():
    draws = np.random.default_rng(1)
    y = np.repeat([0, 1], [10, 990])
    z = draws.normal(size=(1000, 2)) + np.array([[0.0, 0.0], [6.0, 0.0]])[y]
    head = joint_head.fit_discriminant(standard(z, y), 1e-4)
    direction = head.weights[1] - head.weights[0]
    boundary = -(head.bias[1] - head.bias[0]) / direction[0]
    assert boundary == pytest.approx(z[y == 0].mean(axis=0)[0] / 2 + z[y == 1].mean(axis=0)[0] / 2, abs=0.2)


def test_a_class_without_examples_never_wins():
    z, y = data(classes=3)
    head = joint_head.fit_discriminant(standard(z, y), 0.1)
    assert not head.weights[3].any()
    assert head.bias[3] == ABSENT_BIAS
    found = scores(head, 1e6 * z)
    assert np.isfinite(found).all()
    assert (found.argmax(axis=1) < 3).all()
    three = joint_head.standardise_sums(central(z, y, 3))
    assert near(joint_head.fit_discriminant(three, 0.1).weights, head.weights[:3])


def test_constant_and_duplicate_features_do_no_harm():
    z, y = data()
    more = np.hstack([z, z[:, :1], np.full((len(z), 1), 1234.5678), np.zeros((len(z), 1))])
    found = joint_head.fit_discriminant(standard(more, y), 1e-4)
    assert not found.weights[:, -2:].any()
    assert near(found.weights[:, 0], found.weights[:, 12])
    plain = scores(joint_head.fit_discriminant(standard(z, y), 1e-4), z)
    assert np.corrcoef(scores(found, more).ravel(), plain.ravel())[0, 1] > 0.999
    chosen = joint_head.best_penalty(standard(more, y))
    assert np.isfinite(chosen.criterion)


@pytest.mark.parametrize("y", [[2], [2, 2, 2], [1, 2]])
def test_a_handful_of_examples_gives_a_head(y):
    z, _ = data(len(y), 6)
    given = standard(z, np.array(y))
    head = joint_head.fit_discriminant(given, joint_head.best_penalty(given).ridge)
    assert np.isfinite(head.weights).all()
    assert scores(head, z).argmax(axis=1).tolist() == y
