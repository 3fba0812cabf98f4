"""Web page with the status of a dispatcher, coordinator or parameter server, and reports of it.

server    `Dashboard`: serves the page over HTTP until it is stopped
app       the pages, and the stream of events, as an ASGI application
access    who may see the page: the checks of the Host header and of the token
sampler   a thread that requests the status about once a second
history   measurements of the last hour, at a resolution that decreases with age
view      a status as the JSON that the page shows
report    the page with its data in one file
static/   the page: HTML, style sheet and program; they need no build step and load nothing else

The page and the reports are made of the same files. Everything that users name (jobs, functions,
addresses) is untrusted: Python sends it as JSON, and the program inserts it as text.
"""
