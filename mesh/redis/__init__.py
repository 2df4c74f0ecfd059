"""Redis or Valkey, for the services that keep state there (docs/redis.md)."""
