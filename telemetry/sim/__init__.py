"""The simulator: the real scheduler and cache under a virtual clock. Start with `loop`, `workload`, `whatif`."""
