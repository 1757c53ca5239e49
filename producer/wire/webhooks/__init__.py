"""Requests to webhooks: which addresses they may go to, and how they are signed and sent."""
