"""Boards, rules and their proof. Owns: everything that Prometheus, Alertmanager and Grafana are given."""
