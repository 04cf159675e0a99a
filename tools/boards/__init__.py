"""Boards: flashing, recording, examination and clocks."""
