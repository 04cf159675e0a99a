"""Stitching on a device: activations, moments and scores."""
