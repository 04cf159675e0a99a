"""Active jobs of a coordinator, and retention of ended ones."""
