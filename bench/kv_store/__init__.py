"""The KV-cache center: lookups and fetches."""
