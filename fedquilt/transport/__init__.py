"""Transport: links to a broker over MQTT or in memory, and their queues, errors and addresses."""
