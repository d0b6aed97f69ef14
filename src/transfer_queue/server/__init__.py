"""The server process: sockets, timers and supervision around the controller and one storage unit.

    process             starts everything from a `ServerConfig`, watches the owner, cleans up
    settings            what a server is started with
    connection          one connection: framing, handshake, then requests to the service
    connection_limit    how many connections there may be
    sessions            one session is one client over all its connections
    service             what one message does, in memory: controller and unit together, no sockets
    block_requests      what sessions do with the blocks of this server
    pending_commits     commits that the controller has yet to answer, and the blocks that they hold
    cell_digests        digests of cells for writers on other hosts
    fetch_with_data     rows of a task and where their cells are in one answer
    recycling           work that belongs to no request, in slices
    compaction          blocks of which few cells are left are written anew
    copies              a copy takes the place of what was copied, once it is kept and the controller has taken it
    gathering           rows that were put alone become columns
    spilling            blocks go to a disk before memory is full
    engine_blocks       what the storage engine is to delete, and what it has lost
    registered_arenas   this unit's memory as the job's transport reads it
    late_answers        requests that wait for what happens outside of this process
    listening           the sockets that a server is reached at
    home                a server's directory
    turns               whose long request is next
    spinner             looks for the next request before the server sleeps
    event_clock         the time of events, and that nobody looked at it for long
    fd_server           hands out arena descriptors on a unix socket
    bulk_writer         large answers to other hosts, from threads
    controller_node     the server that holds the controller: what it does beyond serving clients
    unit_registry       the storage units of other hosts, as that server knows them
    storage_node        a unit's membership: joining, staying joined
    controller_proxy    the controller of another host, as a unit's server sees it
    standby             another process that takes over when this one is killed
    journal             what lasts, on a disk: the rows outlive the machine
    forks               copies of the server's process
    host_registry       this user's servers on this host, a small file each
    processes           who started whom
    metrics             counts for monitoring, and GET /metrics

Imports neither torch nor ray.
"""
