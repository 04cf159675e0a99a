"""Sites: coordinators that are devices of a parent coordinator."""
