"""The server process: sockets, timers and supervision around the controller and one storage unit.

    process   starts everything from a `ServerConfig`, watches the owner, cleans up
    link      one connection: framing, handshake, then requests to the service
    door      hands out arena descriptors on a unix socket
    service   what one message does, in memory: controller and unit together, no sockets
    metering  the same with counts, where metrics are enabled
    metrics   counts and sizes as Prometheus families, read when they are asked for
    scraping  GET /metrics over HTTP

Imports neither torch nor ray.
"""
