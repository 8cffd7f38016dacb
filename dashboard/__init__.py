"""The live page. Owns nothing of the engine: it reads answers through `telemetry.client` and draws them."""
