"""What lasts, on a disk: the rows outlive the machine.

    journal     when what is written down; begins a new log with a snapshot when one has grown long
    log         facts of many events at once, synced; answers that wait for it
    payloads    the bytes of large blocks, written before their rows are there
    snapshots   the whole state, written by a fork while the server goes on
    recovery    the last snapshot and the facts after it make the state of before
    facts       entries about blocks, and the form of an entry
    files       names, heads and frames: what is torn, and what is damaged
    kept_state  what there is beside blocks: the controller's state, and who its units are
    kept_unit   a unit that says which blocks are new
    kept_member  a unit of another host: it says so before it asks the controller
    history     what happened to rows lately, for whoever looks at one; nothing rests on it

An answer leaves when all that it can say is on the disk. Three kinds of files make one journal: `snapshot-N`, the
state when log N began; `log-N`, the facts since; `blocks-N`, blocks of more than 64 KiB. Smaller ones ride in the log,
and in the next snapshot. Bytes are on the disk before the facts that name them. A range of a blocks file is used again
once it is on the disk that its block is gone.
"""
