"""The worker's HTTP endpoints, and the sources of the live view and the exporter."""
