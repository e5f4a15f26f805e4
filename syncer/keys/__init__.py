"""Certificates for a fleet: an authority of its own, and what servers, learners and readers show.

The only room that needs the package `cryptography`; must not speak TLS itself.
"""
