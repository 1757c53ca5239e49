"""The server side of a connection: finding it, clients, transports, scripts."""
