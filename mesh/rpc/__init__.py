"""gRPC at the edges of every service: servers and channels, what happens around each call, and who calls."""
