"""The PyTorch side; skipped where torch is not installed. `.ci/torch` runs it with torch."""
