"""The demo: real processes train a real model through a real server on one machine.

What a newcomer sees first. Nothing here is needed to serve or to train; only the command line
imports it.
"""
