"""Sensors of boards, one module per kind of meter, battery or memory reading."""
