"""Traces. Owns: the span trees of requests and steps, made after the fact from events, on a thread of their own."""
