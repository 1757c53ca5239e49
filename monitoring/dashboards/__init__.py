"""The Grafana dashboards as code; `python -m pagemill.monitoring.dashboards` writes monitoring/grafana/dashboards."""
