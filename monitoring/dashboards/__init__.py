"""The Grafana boards as code; `python -m pagemill.monitoring.dashboards` writes monitoring/grafana/dashboards."""
