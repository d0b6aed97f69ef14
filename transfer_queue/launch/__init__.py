"""Finding the service of this job, or starting one.

`local` starts a server process on this host. Other launchers get a module each beside it.
"""
