"""Which of UCX's transports KV takes between two containers of one host, by what they share, and how fast it is."""
