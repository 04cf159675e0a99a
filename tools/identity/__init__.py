"""Identities of a fleet: its certificate authority, enrolment, and the broker's configuration."""
