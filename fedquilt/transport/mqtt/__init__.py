"""MQTT link: client, packets and send queue."""
