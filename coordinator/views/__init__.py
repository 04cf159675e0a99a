"""Views of a run for people, computed from its event log."""
