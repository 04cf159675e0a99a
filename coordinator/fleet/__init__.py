"""Devices of the coordinator: records, status, leases and fair shares."""
