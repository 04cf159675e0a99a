"""Certificate authority, enrolment and broker configuration of a fleet."""
