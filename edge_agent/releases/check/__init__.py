"""Check of a release in a process of its own."""
