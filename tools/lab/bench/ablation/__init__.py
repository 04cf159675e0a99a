"""Ablation of the search for stitched networks."""
