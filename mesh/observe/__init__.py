"""What a process says of itself: logs, metrics, and spans of traces, by the keys `observe.*` of its configuration."""
