"""Workers of a simulation: processes and their protocol."""
