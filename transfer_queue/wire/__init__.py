"""What crosses a socket: typed messages, framing without I/O, and the handshake.

`messages` names every request and reply. `framing` cuts a byte stream into frames and receives payload
straight into its destination; the server and both client drivers share it. `hello` proves both sides know the
token. Nothing here opens a socket, and nothing here can execute what it receives.
"""
