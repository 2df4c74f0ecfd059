"""One step: its work, what ranks agree on, and the steps in flight."""
