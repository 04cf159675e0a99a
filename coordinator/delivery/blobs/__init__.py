"""Locations of blobs besides MQTT: the coordinator's own server, and backends of outside packages."""
