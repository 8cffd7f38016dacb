"""The views: arrangement only. Numbers are made in `dashboard.frames`, marks in `dashboard.charts`."""
