"""Signed messages, sessions and enrolment."""
