"""Links of known rate and delay on one machine, and what runs over them take: `python -m benchmarks.lab`."""
