"""`make validity`: what-if predictions held against the real engine on this machine. docs/studies/validity.md."""
