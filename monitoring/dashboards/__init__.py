"""The Grafana boards as code. `python -m monitoring.dashboards` writes them to monitoring/grafana/dashboards."""
