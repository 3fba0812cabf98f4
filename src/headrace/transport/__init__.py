"""How peers talk: one contract, carried in the process, by socket or by shared memory.

The contract, and what serves all carriers:

    channel            calls between two peers, in five rules
    request_tracking   what the calling ends of all carriers share
    channel_poller     one thread waits on many channels
    address            "host:port": read, resolved, judged
    limits             how much a server takes from its peers, and keeps for them
    security           keys, and who is let in

Peers in one process:

    inprocess          messages pass by reference, through queues

Peers in two processes:

    zeromq             the door: `serve` and `connect`
    zeromq_channel     the calling end
    zeromq_connection  one connection of it, from the attempt to the loss
    zeromq_server      the answering end, and its one thread
    request_errors     what it says in the log of requests that went wrong
    zeromq_request     a request, as its handler sees it
    zeromq_reply_writer  answers on their way out, counted
    zeromq_peers       who is connected
    zeromq_binding     taking a port
    authenticator      who is let in, at each handshake
    envelope           what travels: a header, then buffers
    context            the ZeroMQ context that all share
    descriptors        file descriptors of connections, seen from outside ZeroMQ

Peers in two processes of one host:

    shared_memory      the words that the two ends exchange, in five rules
    arena              the end that sends: segments and slots
    copying            copies into them
    free_list          which parts of a segment are free
    mappings           the end that reads: views of slots
"""
