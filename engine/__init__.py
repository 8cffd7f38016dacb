"""The engine: scheduler, KV cache, executors and HTTP front end. Knows no listener; imports nothing above it."""
