"""What parameter servers are told, in which order, and what is told at the end."""

from __future__ import annotations

from headrace.coordinator.shell import ServerTalk


class Told:
    """Servers that answer at once, and who hears of it."""

    def __init__(self):
        self.told = []

    def settle(self, closures, below):
        self.told.append(("settle", list(closures), below))

    def fence(self, worker):
        self.told.append(("fence", worker))

    def low(self):
        return 7

    def fenced(self, session, error):
        self.told.append(("fenced", session, error))

    def settled(self, closures, error):
        self.told.append(("settled", list(closures), error))


def test_what_was_to_be_told_before_the_end_is_told():
    told = Told()
    talk = ServerTalk(told, told)
    talk.tell([1], [2], None)
    talk.tell([3], [4], None)
    talk.end()
    talk.run()
    assert told.told == [
        ("fence", 1),
        ("fenced", 1, None),
        ("fence", 3),
        ("fenced", 3, None),
        ("settle", [2, 4], 7),
        ("settled", [2, 4], None),
    ]
