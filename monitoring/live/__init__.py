"""The live page and its terminal version: a worker's current activity."""
