"""The demo: a real model under a replayed trace, watched live. Owns: load, processes, status and summary."""
