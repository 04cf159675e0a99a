"""Preparation of job bundles, and export and use of results."""
