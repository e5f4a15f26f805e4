"""Bytes of the protocol to messages and back, for both sides; must not know sockets or clocks."""
