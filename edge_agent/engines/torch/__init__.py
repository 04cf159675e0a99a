"""Training with torch."""
