"""Active jobs of a coordinator, from startup to garbage collection."""
