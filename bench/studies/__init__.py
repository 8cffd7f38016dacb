"""`make study`: the studies of docs/studies, each by one command."""
