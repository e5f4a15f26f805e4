"""A whole fleet in one process: real scheduler, wire codec, learner session and merges; everything
else (time, network, threads, the learners' training) is simulated from one seed."""
