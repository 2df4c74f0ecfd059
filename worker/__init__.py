"""The part of a worker's service, outside its ranks, that both kinds of worker share."""
