"""What both kinds of worker share, on the service's side of their ranks."""
