"""Which KV blocks a worker holds, told to routers and observers that are no part of the mesh."""
