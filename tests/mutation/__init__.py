"""Mutations of the round logic: each one is a mistake that the tests must notice."""
