"""Closed forms of stitching: moments, least squares and scores."""
