"""Locations of blobs besides MQTT: the coordinator's own server, and an object store."""
