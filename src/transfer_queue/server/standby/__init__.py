"""A second process that takes over when the server is killed: nothing that was answered is lost.

    journal     what happened since the standby was forked, in memory that both processes share
    records     the kinds of entries, each a typed message
    recording   controller, unit and sessions that write them
    replay      carries them out on the standby's copy of the state
    keeper      forks the standby, hands it new arenas, replaces it when the journal is long
    returning   local sessions that are expected back, as long as their processes live

The standby is a fork of the server (fork(2)): it has all of its state, to the bit, without a format of its own, and
costs what the server has changed since. It sleeps until the server's end of a socket closes. Then it replays the
journal, and serves on the sockets that it inherited: the service keeps its identity, and clients connect again by
themselves. A journal is as long as a new standby is cheap to make; nothing is ever read from a disk.

The server calls `StandbyKeeper.settle` when an event is over, before its answer leaves. Whoever is killed in the middle
of one leaves a journal without it, and its request is asked again.
"""
