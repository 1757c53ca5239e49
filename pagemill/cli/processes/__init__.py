"""Commands that start processes: a worker, a gateway, an exporter, a relay, or all of a host."""
