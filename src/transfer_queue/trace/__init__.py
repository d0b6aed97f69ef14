"""What the processes of a job did and when, as files that `tq trace` joins to one timeline, and as spans of
OpenTelemetry. Nothing here knows a session, a row's data or a model: `client` and `weights` say what to note.

switch      what this process records now: `start`, `stop`, TQ_TRACE, TQ_OTEL, forks
activity    a stretch of work that is no operation of a client, such as an update of weights
recorder    spans of one process, made into lines in a thread of its own
file        its files, written in another
telemetry   spans of OpenTelemetry, through its API alone
lines       the lines of such a file
rows        which rows a span was about, in few bytes
recordings  the files of a folder, read with care
clocks      one clock for the processes of several hosts
tracks      which spans lie beside each other
flows       the way of a row from the put that wrote it to the step that used it
timeline    the whole as a trace that Perfetto and Chrome open
"""

from transfer_queue.trace.switch import start as start
from transfer_queue.trace.switch import stop as stop

__all__ = ["start", "stop"]
