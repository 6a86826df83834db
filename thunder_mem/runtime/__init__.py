"""What runs: executors, compiled regions, transfers to the host, states of generators."""
