"""State of an agent on its disk."""
