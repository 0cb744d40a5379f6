"""The driver: turns jobs into requests to workers, and their replies into events. Never imports torch."""
