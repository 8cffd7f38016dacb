"""Exports of what an engine published: Parquet tables and Perfetto traces, of journals and of a running engine."""
