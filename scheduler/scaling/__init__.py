"""How many replicas each role should have, and whose end costs least."""
