"""What a GPU is asked about this engine, in one command: `python -m bench.gpu_check` (make gpu-check, docs/gpu.md)."""
