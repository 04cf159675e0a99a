"""Federations in one process on virtual time, in which disks, networks, clocks and processes fail by a schedule."""
