"""Training with numpy."""
