"""Kernels in C for the processor at hand, compiled there, with torch's operations beside them where they cannot be."""
