"""What the next step computes: pure functions of requests' progress and of free blocks."""
