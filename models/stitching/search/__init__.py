"""Search for stitched networks."""
