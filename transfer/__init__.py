"""Moving KV blocks between processes over UCX: landings, segments, staging slots, pushes. Torch-free."""
