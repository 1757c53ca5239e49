"""`pagemill up`: the workers of one host, a gateway and an exporter under one supervisor. Does not import torch."""
