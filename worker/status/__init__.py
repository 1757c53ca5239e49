"""What a worker tells over HTTP, and where the live view and the exporter get it from."""
