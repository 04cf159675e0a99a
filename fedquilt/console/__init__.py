"""Text for terminals: tables, progress and units."""
