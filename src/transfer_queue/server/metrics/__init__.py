"""What monitoring sees.

counters    requests, counted as they are answered
collector   counts and sizes as Prometheus families, read when they are asked for
http        GET /metrics
"""
