"""Transfer of blobs over MQTT and HTTP."""
