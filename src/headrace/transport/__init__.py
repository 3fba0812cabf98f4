"""How peers talk: one contract (`channel`), carried in the process, by socket or shared memory."""
