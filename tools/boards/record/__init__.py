"""Tools for one board: clock control, measurement and profile recording."""
