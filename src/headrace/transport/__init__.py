"""Transport between peers: one interface, implemented in process, by sockets and by shared memory.

The interface, and parts used by all transports:

    channel            interface of channels, servers and requests, in five rules
    request_tracking   base of all channels
    channel_poller     waiting on many channels with one thread
    address            parsing and resolution of "host:port"
    limits             limits of what a server accepts and buffers
    security           keys and authorized clients

Peers in one process:

    inprocess          messages passed by reference, through queues

Peers in two processes:

    zeromq             entry points: `serve` and `connect`
    zeromq_channel     the client's channel
    zeromq_connection  one connection of a channel, from the attempt to the loss
    zeromq_server      the server and its thread
    request_errors     rate-limited logging of failed requests
    zeromq_request     a request, as its handler sees it
    zeromq_reply_writer  sending of replies, with counts of pending bytes
    zeromq_peers       connected peers of a server
    zeromq_binding     binding to a port
    authenticator      check of keys at each handshake
    envelope           wire format: a header, then buffers
    context            the ZeroMQ context shared by a process
    descriptors        file descriptors of connections, used without ZeroMQ

Peers in two processes on one host:

    shared_memory      protocol of owner and reader, in five rules
    arena              the owner's side: segments and slots
    copying            copies into them
    free_list          free ranges of a segment
    mappings           the reader's side: views of slots
"""
