"""Sensors of boards: one file per kind of meter, battery or memory reading."""
