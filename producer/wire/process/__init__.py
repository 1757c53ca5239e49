"""What the long-lived processes of both sides have in common: how they are stopped, and what their loops log."""
