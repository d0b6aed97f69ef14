"""What crosses a socket: typed messages, framing without I/O, and the handshake.

    messages      every request and reply, a file for each topic
    framing       cuts a byte stream into frames and receives payload straight into its destination
    handshake     both sides prove that they know the token, and which life of the service they mean
    address       where a server is; `token`: what it wants to be shown; `peer`: who is at the other end
    aio           one connection for an event loop
    arena_fds     the messages with which arena descriptors are handed out
    arrays        row numbers and other arrays on the wire
    lives         what names the life that the number of a row is from
    server_info   what TransferQueue's `ZMQServerInfo` says of a server

Nothing here can execute what it receives.
"""
