"""Tests of checkpoints: formats, files, the saver, resume."""
