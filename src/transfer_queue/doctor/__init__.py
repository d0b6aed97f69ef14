"""Whether a backend works between hosts: a service of its own, with a unit on every host, is tried and ended again.

    trial           asks every host in turn, and makes the report
     ├─ hosts       how the trial reaches a host: this one, or one on which an agent listens
     └─ report      what came of it, and how each trouble is mended
    running         the servers of a service that runs, tried from this host
    agent           waits on a host for a trial that is led elsewhere
    member_process  the process that takes part for a host, seen from the one that started it
    member          what that process does: it starts a server, writes and reads
    messages        what they say to each other

Nothing here knows a backend. A host takes part as it would in a job, by a server and a client with the settings of that
job, so what works here works there by the same code.
"""
