"""Everything that listens to the engine: records, metrics, spans, the read API and its client."""
