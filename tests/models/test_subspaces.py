"""Subspaces of examples, and K-means over them."""

import numpy as np

from fedquilt.models import subspaces


def test_a_subspace_is_orthonormal_and_spans_what_the_examples_do():
    draws = np.random.default_rng(0)
    plane = np.linalg.qr(draws.normal(size=(12, 2)))[0]
    x = (draws.normal(size=(20, 2)) @ plane.T).reshape(20, 3, 4)
    found = subspaces.compute_subspace(x, 5)
    assert found.shape == (12, 5)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.T @ found, np.diag([1, 1, 0, 0, 0]), atol=1e-5)
    flat = x.reshape(20, 12)
    np.testing.assert_allclose(flat @ found @ found.T, flat, atol=1e-5)


def test_signs_are_fixed_and_bytes_are_fractions():
    x = np.random.default_rng(1).integers(0, 256, (30, 4, 4)).astype(np.uint8)
    found = subspaces.compute_subspace(x, 3)
    np.testing.assert_allclose(subspaces.compute_subspace(x[::-1] / 255.0, 3), found, atol=1e-5)
    assert (found[np.abs(found).argmax(axis=0), np.arange(3)] > 0).all()


def test_more_vectors_than_examples_have_values_are_zeros():
    found = subspaces.compute_subspace(np.eye(3), 5)
    assert found.shape == (3, 5)
    assert not found[:, 3:].any()


def test_the_first_vector_tells_the_mean_picture_and_a_single_example_itself():
    """The leak that the paper does not speak of: a cosine near 1 for pictures, 1 for one of them."""
    x = np.random.default_rng(2).integers(100, 200, (50, 8, 8)).astype(np.uint8)
    assert subspaces.mean_similarity(x, subspaces.compute_subspace(x, 5)) > 0.99
    assert subspaces.mean_similarity(x[:1], subspaces.compute_subspace(x[:1], 5)) > 0.9999
    centred = np.random.default_rng(3).normal(size=(400, 20))
    assert subspaces.mean_similarity(centred, subspaces.compute_subspace(centred, 5)) < 0.9


def test_clusters_are_found_and_numbered_by_their_first_member():
    truth = np.array([2, 0, 0, 1, 2, 1, 0, 2])
    points = np.array([[0, 0], [9, 0], [0, 9]])[truth] + np.random.default_rng(0).normal(0, 0.1, (8, 2))
    for seed in range(5):
        owner, centres = subspaces.cluster_points(points, 3, np.random.default_rng(seed))
        assert owner.tolist() == [0, 1, 1, 2, 0, 2, 1, 0]
        np.testing.assert_allclose(centres[1], points[truth == 0].mean(axis=0))


def test_there_are_no_more_clusters_than_different_points():
    owner, centres = subspaces.cluster_points(np.ones((5, 2)), 4, np.random.default_rng(0))
    assert owner.tolist() == [0] * 5
    assert centres.shape == (1, 2)
    owner, _ = subspaces.cluster_points(np.array([[0.0], [0.0], [1.0]]), 4, np.random.default_rng(0))
    assert owner.tolist() == [0, 0, 1]


def test_nearest_is_by_the_distance_of_all_values():
    centres = np.array([[[0.0, 1.0]], [[1.0, 0.0]]])
    assert subspaces.nearest_cluster(np.array([[0.9, 0.2]]), centres) == 1
    assert subspaces.nearest_cluster(np.array([[0.5, 0.5]]), centres) == 0
