"""The inference engine that both kinds of worker run."""
