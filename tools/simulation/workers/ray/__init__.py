"""Workers of a simulation on a Ray cluster."""
