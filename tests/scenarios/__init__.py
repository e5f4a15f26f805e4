"""Scenarios of the round logic: text files that a person can read, played by every test run."""
