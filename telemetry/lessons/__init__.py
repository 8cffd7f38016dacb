"""Lessons. Owns: teaching situations as data, played by the real scheduler, told one decision at a time."""
