"""What a request passes before the application sees it: the connection, its limits, and where it comes from."""
