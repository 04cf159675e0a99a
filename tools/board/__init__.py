"""Tools for one board: hold its clocks, measure it, record its profile."""
