"""A page in a browser that shows a running service: `tq page`, or `tq serve --page PORT`.

It is a process of its own, attached as a client. It changes nothing, and nobody can change anything through it.

serving     the process: its listener, the HTTP server, its end
beside      a page that is started beside a server and ends with it; free of torch and starlette
app         the routes: the page itself, its events, one row, one image
access      who may look: token, host, headers of every answer
watching    one thread that asks the service while somebody looks, for all of them
maps        how often the map of a partition may be asked for
rates       what changed per second, from several overviews
shown       an overview as the page gets it, bounded and printable
fragments   the HTML of it, in parts that are sent when they change
printable   texts of anybody, as they may be shown; what stands for a long name
waits       who waits for what, in few words
journey     what became of one row, as the page gets it
previews    the beginning of a value; nothing is evaluated
png         a small picture of an image

`templates/` has the page and its parts. `static/` has HTMX, as published, and the script that draws the map. There is
no build step, and nothing comes from elsewhere. A hash (`ident`) names partitions and fields in requests, since their
names may be of any length.
"""
