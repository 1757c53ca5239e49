"""Notifications of ended jobs over HTTP."""
