"""What crosses a socket: typed messages, framing without I/O, and the handshake.

    messages              every request and reply
    framing               cuts a byte stream into frames, and receives payload straight into its destination
    defects               errors that nobody foresaw while a request was handled
    handshake             both sides prove that they know the token
    reception             the end that is called carries it out over a blocking socket
    visitors              those who connect to such a socket, each in a thread of its own
    blocking              the calling end in a thread: one request at a time; servers of weights, too
    aio                   the calling end on an event loop: many requests in flight
    notices               what calls wait for, in the log of their process
    arena_fds             the two messages that hand out an arena's descriptor, and how one is received
    arrays, lives         numbers as they travel; what names the life that a row's number is from
    address, token        where a server is, and what opens it
    peer                  who is at the other end of a unix socket
    server_info           `ZMQServerInfo`, as programs written for TransferQueue name a service

The server and both client drivers share `framing`. Nothing here can execute what it receives.
"""
