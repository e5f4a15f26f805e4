"""Pure round logic: (state, now, event) -> actions. No socket, clock, thread, file or float array."""
