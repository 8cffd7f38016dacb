"""Five incidents, each made on purpose, diagnosed with the product's own tools, and cured: docs/debugging.md."""
