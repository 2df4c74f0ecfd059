"""Quality: tasks whose answers can be checked."""
