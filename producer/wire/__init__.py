"""The wire contract that producers and workers share."""
